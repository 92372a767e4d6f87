"""Whether a model fits its device, said in one sentence before anything is loaded."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError

from .device_memory import DeviceMemory, gpus_memory
from .devices import CPU
from .engine_options import CHECK_MEMORY, FLAG
from .host_memory import host_memory
from .model_memory import Needs, needs_of
from .sources import resolve_source

log = logging.getLogger(__name__)

_ENGINES = frozenset({"openvino", "transformers", "vllm"})  # those whose use of memory we know
_MIB = 1 << 20
_VLLM_SHARE = 0.9  # of a GPU's memory that vLLM takes unless gpu_memory_utilization says otherwise
_PATIENCE_S = 20.0
_LOOK_EVERY_S = 1.0


def without_check(entry: ModelEntry) -> tuple[ModelEntry, bool]:
    """The entry as its engine knows it, and whether memory is to be checked. Raises ConfigurationError."""
    if entry.engine not in _ENGINES:
        return entry, False
    options = dict(entry.options)
    wanted = options.pop(CHECK_MEMORY, True)
    refusal = FLAG.refusal(CHECK_MEMORY, wanted)
    if refusal is not None:
        raise ConfigurationError(f"[models.{entry.name}] options: {refusal}")
    return replace(entry, options=options), wanted


def check_fit(
    entry: ModelEntry,
    device: str,
    *,
    environment: Mapping[str, str] | None = None,
    sleep: Callable[[float], Any] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Raises ConfigurationError when a device is missing, or has too little memory for the model.

    Memory that others hold may come free, as that of a process that just died does: it is waited for, 20 s at most.
    """
    if entry.engine not in _ENGINES or entry.source is None:  # an engine without a source says so itself
        return
    needs = needs_of(entry, resolve_source(entry.source), device=device)
    deadline = clock() + _PATIENCE_S
    while True:
        memory = _memory(device, os.environ if environment is None else environment)
        reason = misfit(entry, needs, memory)
        if reason is None:
            _tell(entry, needs, memory)
            return
        hopeless = any(wanted_bytes(entry, needs, len(memory), one) > one.total_bytes for one in memory)
        if hopeless or device == CPU or clock() >= deadline:
            raise ConfigurationError(reason)
        sleep(_LOOK_EVERY_S)


def wanted_bytes(entry: ModelEntry, needs: Needs, devices: int, memory: DeviceMemory) -> int:
    """What the model takes of one of so many devices that share it: vLLM takes its share of the device at once."""
    least = (needs.weights + needs.row) // max(1, devices) + needs.runtime
    if entry.engine != "vllm" or not memory.gpu or "kv_cache_memory_bytes" in entry.options:
        return least
    share = entry.options.get("gpu_memory_utilization") or _VLLM_SHARE
    return max(int(float(share) * memory.total_bytes), int(least / float(share)))


def misfit(entry: ModelEntry, needs: Needs, memory: Sequence[DeviceMemory]) -> str | None:
    """One sentence about the first device that the model does not fit; None when it fits all of them."""
    for one in memory:
        wanted = wanted_bytes(entry, needs, len(memory), one)
        if wanted <= one.free_bytes:
            continue
        parts = f"weights {_mib(needs.weights)}, KV cache of one row of {needs.row_tokens} tokens {_mib(needs.row)}"
        model = f"model {entry.name} needs about {_mib(wanted)} MiB ({parts}, runtime {_mib(needs.runtime)})"
        if len(memory) > 1:
            model = f"{model} on each of {len(memory)} devices"
        if wanted > one.total_bytes:
            return f"{model}, but {one.name} is too small: it has {_mib(one.total_bytes)} MiB; {_smaller(entry)}"
        return f"{model}, but {one.name} is busy: {_mib(one.free_bytes)} of {_mib(one.total_bytes)} MiB are free, {_who(one)}"
    return None


def _smaller(entry: ModelEntry) -> str:
    way = "take a smaller or quantised model"
    if entry.engine == "vllm":
        way += ", lower options.max_model_len, or join GPUs (--devices 0+1)"
    return f"{way}, or set options.{CHECK_MEMORY} = false to try all the same"


def _who(memory: DeviceMemory) -> str:
    if not memory.holders:
        return "other processes hold the rest; end them, or set options.check_memory = false to try all the same"
    held = ", ".join(f"{h.pid}" + (f" ({h.mib} MiB)" if h.mib is not None else "") for h in memory.holders)
    word = "process" if len(memory.holders) == 1 else "processes"
    hold = "holds" if len(memory.holders) == 1 else "hold"
    return f"{word} {held} {hold} the rest; end {'it' if len(memory.holders) == 1 else 'them'}, or use another device"


def _memory(device: str, environment: Mapping[str, str]) -> list[DeviceMemory]:
    if device.lower() == CPU:
        host = host_memory()
        return [] if host is None else [host]
    pinned = [one.strip() for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return gpus_memory(pinned) if device.lower().startswith("cuda") and pinned else []


def _tell(entry: ModelEntry, needs: Needs, memory: Sequence[DeviceMemory]) -> None:
    for one in memory:
        log.info(
            "model_fits model=%s device=%s free_mib=%d weights_mib=%d row_mib=%.1f row_tokens=%d rows=%s",
            entry.name,
            one.name,
            one.free_bytes // _MIB,
            needs.weights // _MIB,
            needs.row / _MIB,
            needs.row_tokens,
            needs.rows_in(one.free_bytes * len(memory)),
        )


def _mib(size: int) -> int:
    return -(-size // _MIB)
