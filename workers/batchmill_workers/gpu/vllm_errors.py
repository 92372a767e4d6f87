"""What vLLM's errors mean: a cause that only its log tells, a sentence for the user, a kind for the worker."""

from __future__ import annotations

import re
from collections.abc import Iterable

from batchmill_workers.gpu.batching_faults import is_device_lost

# (EngineCore pid=12) ERROR 12-01 01:00:45 [core.py:1200] ValueError: what was wrong
_LOG_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")  # versions before 0.12 colour the first part of the prefix
_ERROR_LINE = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception)|Exception)(?:: (.+)|$)")
_DIED_LINE = re.compile(r"^(?:Worker|Engine core) proc .*? died unexpectedly(?: \([^)]*\))?")
_INVALID_VALUE = re.compile(
    r"^1 validation error for \w+ (?:Value|Assertion) error, "
)  # pydantic's, before the message
_KILLED = re.compile(r"failed core proc\(s\): \{.*?: -(\d+)", re.IGNORECASE)
_FOLLOWS_ANOTHER = ("see stack trace", "see root cause", "initialization failed", "failed core proc")
_DEVICE_IS_USED = ("free memory on device", "available memory on node")
_NO_CACHE = ("no available memory for the cache", "kv cache is needed", "available kv cache memory")
_OUT_OF_MEMORY = ("out of memory", "memoryerror", "cannot allocate memory", "can't allocate memory")
_BY_KERNEL = ", as the kernel does when the host's memory is used up"


def root_cause(lines: Iterable[str]) -> str | None:
    """The first error that a log tells and that is not the consequence of another one, without its class for ours."""
    for line in lines:
        died = _DIED_LINE.match(_plain(line))
        if died:
            return died[0]
        found = _ERROR_LINE.match(_plain(line))
        if found and not _follows(found[2] or ""):
            return f"{found[1]}: {found[2]}" if found[2] else found[1]
    return None


def load_failure(error: BaseException, lines: Iterable[str]) -> str:
    """One sentence on why the model cannot be loaded, and what to change if it is too big for its device."""
    said = " ".join(str(error).split()).partition(" [type=")[0] or type(error).__name__  # pydantic adds its input
    return with_advice(_cause(said, list(lines)) if _follows(said) else _INVALID_VALUE.sub("", said))


def death(lines: Iterable[str]) -> tuple[str, bool]:
    """Why vLLM's engine died while it answered, by its log, and whether its device is lost, so that no row is to blame."""
    cause = root_cause(lines)
    if cause is None:
        return "vLLM's engine died; its log says why", False
    return f"vLLM's engine died: {with_advice(cause)}", is_device_lost(RuntimeError(cause))


def _cause(said: str, lines: list[str]) -> str:
    """What is behind an error that only says that another process failed."""
    told = root_cause(lines)
    if told is not None:
        return told
    killed = _KILLED.search(said)
    if killed:
        return f"vLLM's engine was killed by signal {killed[1]} while it loaded{_BY_KERNEL if killed[1] == '9' else ''}"
    last = next((plain for line in reversed(lines) if (plain := _plain(line))), None)
    return said if last is None else f"{said} The last line of its log: {last}"


def with_advice(cause: str) -> str:
    """The cause, led by what to change where it is a lack of memory."""
    lower = cause.lower()
    if any(sign in lower for sign in _DEVICE_IS_USED):
        return f"too little of the device's memory is free; lower options.gpu_memory_utilization, or free it: {cause}"
    if any(sign in lower for sign in _NO_CACHE):
        return (
            "the key-value cache does not fit beside the weights; lower options.max_model_len, or raise "
            f"options.gpu_memory_utilization (on the processor kv_cache_memory_bytes): {cause}"
        )
    if any(sign in lower for sign in _OUT_OF_MEMORY):
        return (
            "the model is too big for the device; lower options.gpu_memory_utilization, max_num_seqs or max_model_len, "
            f"set options.quantization, or use several devices (--devices 0+1): {cause}"
        )
    return cause


def kind_of(error: BaseException) -> tuple[str, str]:
    """Kind and message of an error that one request met, as ``hosted_process.failure`` takes them."""
    cause = error.__cause__ if type(error).__name__ == "EngineGenerateError" and error.__cause__ else error
    told = " ".join(str(cause).split()) or type(cause).__name__
    classes = {one.__name__ for one in type(cause).__mro__}
    if classes & {"ValueError", "TypeError", "NotImplementedError", "VLLMClientError"}:
        return "invalid_request", told
    return "engine_failed", f"{type(cause).__name__}: {told}"


def is_death(error: BaseException) -> bool:
    """Whether the error means that vLLM's engine is gone and the process with it."""
    return any(one.__name__ == "EngineDeadError" for one in type(error).__mro__)


def _plain(line: str) -> str:
    """A line of the log without colours and vLLM's prefix."""
    return _LOG_PREFIX.sub("", _COLOUR.sub("", line)).strip()


def _follows(message: str) -> bool:
    lower = message.lower()
    return any(sign in lower for sign in _FOLLOWS_ANOTHER)
