"""What reads the figures of a worker's devices: the processor's by psutil, those of GPUs by NVML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from batchmill_db.samples import DeviceReading

from .devices import CPU
from .sampler_cpu import CpuReader
from .sampler_nvml import NvmlReader


class Reader(Protocol):
    """Reads devices. It never raises: a figure that cannot be had is None."""

    @property
    def devices(self) -> Sequence[str]: ...

    def peek(self) -> None:
        """Called each second between two samples."""

    def read(self) -> list[DeviceReading]: ...

    def close(self) -> None: ...


def reader_for(device: str, environment: Mapping[str, str] | None = None) -> Reader:
    """The reader of an engine's device (``cpu``, ``cuda:0``) in a process that is pinned by its environment."""
    if device.lower() == CPU:
        return CpuReader()
    pinned = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES", "")
    names = [one.strip() for one in pinned.split(",") if one.strip()]
    return NvmlReader(names or [device.partition(":")[2] or "0"])
