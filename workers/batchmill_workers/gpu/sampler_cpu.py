"""What the processor of this host says about itself, by psutil."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from batchmill_db.samples import DeviceReading

from .device_kind import usable_memory_mib
from .devices import CPU

T = TypeVar("T")
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_CGROUP = Path("/sys/fs/cgroup")


class CpuReader:
    """The cores that this process may run on, and the memory that it may use. Reads nothing that waits."""

    def __init__(self) -> None:
        self._percent_of_cores()  # figures are those since the call before

    @property
    def devices(self) -> tuple[str, ...]:
        return (CPU,)

    def peek(self) -> None:
        """Nothing to be done between two samples: psutil's use is a mean by itself."""

    def read(self) -> list[DeviceReading]:
        used, total = _memory()
        return [
            DeviceReading(
                device=CPU,
                use_percent=self._percent_of_cores(),
                memory_used_bytes=used,
                memory_total_bytes=total,
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


def _memory() -> tuple[int | None, int | None]:
    """(used, total) bytes: the host's, or the container's where its limit is less."""
    host = _tried(psutil.virtual_memory)
    limit = usable_memory_mib() << 20
    if host is None:
        return None, limit or None
    if limit and limit < host.total - (1 << 20):
        return _tried(_container_memory), limit
    return host.total - host.available, host.total


def _container_memory() -> int:
    """Without the file cache that goes when memory is short, as container tools count it."""
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return max(0, int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0)))


def _temperature() -> float | None:
    found = psutil.sensors_temperatures()
    readings = [r.current for name in _SENSORS for r in found.get(name, ()) if r.current]
    return max(readings, default=None)


def _clock() -> int | None:
    frequency = psutil.cpu_freq()
    return round(frequency.current) if frequency and frequency.current else None
