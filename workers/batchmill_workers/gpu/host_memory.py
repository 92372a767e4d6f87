"""How much memory a process on this host may use and what of it is free: the host's, its control groups', `ulimit -v`."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from .device_memory import DeviceMemory

_ROOT = Path("/")


def host_memory(root: Path = _ROOT) -> DeviceMemory | None:
    """Of this host, its container or its `ulimit -v`, whichever leaves least; None where the system does not tell."""
    bounds = [*_of_host(root), *_of_cgroups(root), *_of_limit()]
    return min(bounds, key=lambda memory: memory.free_bytes, default=None)


def memory_in_use(root: Path = _ROOT) -> DeviceMemory | None:
    """Of this host or its container, whichever is smaller; None where the system does not tell."""
    return min([*_of_host(root), *_of_cgroups(root)], key=lambda memory: memory.total_bytes, default=None)


def _of_host(root: Path) -> Iterator[DeviceMemory]:
    lines = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    kib = {name: int(rest.split()[0]) for name, rest in lines.items() if rest.split()}
    if "MemAvailable" in kib and "MemTotal" in kib:
        total, free = kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
        yield DeviceMemory(name="this host", total_bytes=total, free_bytes=free)
    elif root == _ROOT:  # no Linux
        try:
            told = psutil.virtual_memory()
        except (psutil.Error, OSError, NotImplementedError, RuntimeError):
            return
        yield DeviceMemory(name="this host", total_bytes=told.total, free_bytes=told.available)


def _of_cgroups(root: Path) -> Iterator[DeviceMemory]:
    """Of this process's control group and those above it (cgroup v2); pages of files that can be dropped count as free."""
    own = next((line[3:] for line in _read(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    base = root / "sys/fs/cgroup"
    folder = base / own.strip("/")
    for one in (folder, *(p for p in folder.parents if p.is_relative_to(base))):
        limit, used = _read(one / "memory.max").strip(), _read(one / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _read(one / "memory.stat").splitlines() if len(line.split()) == 2)
            held = max(0, int(used) - int(stat.get("inactive_file", 0)))
            free = max(0, int(limit) - held)
            yield DeviceMemory(name="this container", total_bytes=int(limit), free_bytes=free)


def _of_limit() -> Iterator[DeviceMemory]:
    """An engine's process starts with nothing, so that the whole of what `ulimit -v` allows is free to it."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] if os.name == "posix" else -1
    if limit not in (-1, resource.RLIM_INFINITY):
        yield DeviceMemory(name="a process under ulimit -v", total_bytes=limit, free_bytes=limit)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
