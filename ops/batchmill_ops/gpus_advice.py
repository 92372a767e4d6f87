"""What to do about what a device shows: sentences that name the setting, the option or the command to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .gpus_diagnosis import Verdict

# By engine: the option under [models.M] for how many rows are computed at once, what saves memory, and what gives more.
_ROWS_AT_ONCE = {
    "vllm": "max_num_seqs",
    "openvino": "capacity_rows",
    "transformers": "max_rows",
    "server": "capacity_rows",
}
_SAVES_MEMORY = {
    "vllm": 'lower max_model_len, or set quantization or kv_cache_dtype = "fp8"',
    "openvino": "lower capacity_rows or set cache_gb",
    "transformers": 'lower max_batch_tokens, or set dtype = "bfloat16"',
    "server": "lower capacity_rows",
}
_GIVES_MEMORY = {"vllm": "raise gpu_memory_utilization"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the advice is about: a device of a host, the model it serves with which engine, and how it is fed now.

    ``elsewhere`` are models whose rows wait and that no worker serves.
    """

    host: str
    device: str
    model: str | None = None
    engine: str | None = None
    gpu_slots: int = 2
    elsewhere: Sequence[str] = ()

    @property
    def options(self) -> str:
        return f"the options of [models.{self.model or 'M'}]"

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def advice(verdict: Verdict, place: Place) -> str | None:
    """One sentence, or two; None where there is nothing to do."""
    say = _ADVICE.get(verdict)
    return None if say is None else say(place)


def _silent(place: Place) -> str:
    return f"see what the worker's log on {place.host} says of samples, and whether `batchmill doctor` finds the database well"


def _gone(place: Place) -> str:
    return f"to start one on {place.host}: `batchmill worker gpu --model {place.model or 'M'}`"


def _throttled(place: Place) -> str:
    if place.is_cpu:
        return "look after the cooling of the host"
    return (
        f"look after the cooling of {place.host} (fans, airflow, inlet temperature), or lower the power limit: "
        f"`nvidia-smi -i {place.device} -pl WATTS`"
    )


def _starved(place: Place) -> str:
    return (
        f"raise gpu_slots in batchmill.toml ({place.gpu_slots} now) or submit with a larger --chunk-size, so that the next "
        "rows are there before the last ones are done; if chunks stay ready, `batchmill doctor` says what holds them up"
    )


def _memory_bound(place: Place) -> str:
    saves = _SAVES_MEMORY.get(place.engine or "", "take a smaller or quantised model")
    ways = f"in {place.options} {saves}" if place.engine in _SAVES_MEMORY else saves
    spread = "" if place.is_cpu else ", or use two GPUs as one: `--devices 0+1`"
    return f"memory keeps more rows from running at once: {ways}; a lower --param max_tokens helps too{spread}"


def _latency(place: Place) -> str:
    at_once = _ROWS_AT_ONCE.get(place.engine or "")
    lower = (
        f"{at_once} in {place.options}, or gpu_slots"
        if at_once
        else "gpu_slots, or how many rows its models run at once"
    )
    return f"lower {lower}, or ask for less with --param max_tokens; if only throughput counts, raise gpu_p99_ms"


def _room(place: Place) -> str:
    at_once = _ROWS_AT_ONCE.get(place.engine or "")
    more = f"raise {at_once} in {place.options}" if at_once else "raise gpu_slots"
    gives = _GIVES_MEMORY.get(place.engine or "")
    return f"more rows fit at once: {more}" + (f", {gives}" if gives and not place.is_cpu else "")


def _compute_bound(place: Place) -> str:
    return (
        f"this device gives what it can; for more, add one: `batchmill worker gpu --model {place.model or 'M'} "
        "--devices …` here or on another host, or take a smaller or quantised model"
    )


def _out_of_work(place: Place) -> str | None:
    if not place.elsewhere:
        return None
    model = place.elsewhere[0]
    return f"rows of {', '.join(place.elsewhere)} wait and nobody serves them: `batchmill worker gpu --model {model}`"


def _unknown(place: Place) -> str:
    return f"on {place.host}: `pip install 'batchmill[nvidia]'`, and `nvidia-smi` must answer; the worker's log names the error"


_ADVICE: Mapping[Verdict, Callable[[Place], str | None]] = {
    Verdict.SILENT: _silent,
    Verdict.GONE: _gone,
    Verdict.THROTTLED: _throttled,
    Verdict.STARVED: _starved,
    Verdict.MEMORY_BOUND: _memory_bound,
    Verdict.LATENCY: _latency,
    Verdict.ROOM: _room,
    Verdict.COMPUTE_BOUND: _compute_bound,
    Verdict.OUT_OF_WORK: _out_of_work,
    Verdict.UNKNOWN: _unknown,
}
