"""What the processor of this host says about itself, by psutil."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from batchmill_db.samples import DeviceReading

from .devices import CPU
from .host_memory import memory_in_use

T = TypeVar("T")
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


class CpuReader:
    """The cores that this process may run on, and the memory that it may use. Reads nothing that waits."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._percent_of_cores()  # figures are those since the call before

    @property
    def devices(self) -> tuple[str, ...]:
        return (CPU,)

    def peek(self) -> None:
        """Nothing to be done between two samples: psutil's use is a mean by itself."""

    def read(self) -> list[DeviceReading]:
        memory = memory_in_use(self._root)
        return [
            DeviceReading(
                device=CPU,
                use_percent=self._percent_of_cores(),
                memory_used_bytes=memory.total_bytes - memory.free_bytes if memory else None,
                memory_total_bytes=memory.total_bytes if memory else None,
                temperature_c=_tried(_temperature),
                clock_mhz=_tried(_clock),
            )
        ]

    def close(self) -> None:
        """Nothing is held."""

    def _percent_of_cores(self) -> float | None:
        percents = _tried(lambda: psutil.cpu_percent(percpu=True)) or []
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(percents))
        mine = [p for core, p in enumerate(percents) if core in allowed]
        return sum(mine) / len(mine) if mine else None


def _tried(read: Callable[[], T]) -> T | None:
    """What a host does not have, psutil says by many kinds of error."""
    try:
        return read()
    except (psutil.Error, OSError, NotImplementedError, RuntimeError, AttributeError, ValueError):
        return None


def _temperature() -> float | None:
    found = psutil.sensors_temperatures()
    readings = [r.current for name in _SENSORS for r in found.get(name, ()) if r.current]
    return max(readings, default=None)


def _clock() -> int | None:
    frequency = psutil.cpu_freq()
    return round(frequency.current) if frequency and frequency.current else None
