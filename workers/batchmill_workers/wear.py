"""When a worker process has done enough and makes room for a fresh one: by its chunks or by its memory."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from batchmill_core.errors import ConfigurationError

_MIB = 1 << 20
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """The bounds of ``worker_max_chunks`` and ``worker_max_memory_mb`` (MiB); None means no bound."""

    max_chunks: int | None = None
    max_memory_mib: int | None = None

    def reason(self, *, chunks: int, memory_mib: int | None) -> str | None:
        """Why a process that ended so many attempts and holds so much memory (None: not known) should be renewed."""
        if self.max_chunks is not None and chunks >= self.max_chunks:
            return f"it has run {chunks} chunks (worker_max_chunks is {self.max_chunks})"
        if self.max_memory_mib is not None and memory_mib is not None and memory_mib > self.max_memory_mib:
            return f"it holds {memory_mib} MiB (worker_max_memory_mb is {self.max_memory_mib})"
        return None

    def check_fresh(self, memory_mib: int | None) -> None:
        """Raises ConfigurationError when a process that has just started is past the bound: it would start for ever."""
        if self.max_memory_mib is not None and memory_mib is not None and memory_mib > self.max_memory_mib:
            raise ConfigurationError(
                f"worker_max_memory_mb is {self.max_memory_mib}, but a worker that has just started holds {memory_mib} MiB; "
                "raise it well above that"
            )


def memory_mib(pid: int | None = None, *, proc: Path = _PROC) -> int | None:
    """Resident memory of a process (default: this one) and all its descendants, in MiB; None where /proc is missing.

    An engine's process is a child of its worker, and what it starts in turn counts too. Pages that they share count
    once for each. Source of the formats: proc_pid_stat(5) and proc_pid_statm(5).
    """
    children = _children(proc)
    todo, found, pages = [os.getpid() if pid is None else pid], set[int](), 0
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            pages += _resident_pages(proc, one)
            todo += children[one]
    return pages * os.sysconf("SC_PAGE_SIZE") // _MIB or None


def _children(proc: Path) -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in proc.glob("[0-9]*"):
        try:
            # The second field, the command in brackets, may hold anything; the parent is the second after it.
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended meanwhile
            continue
        children[parent].append(int(folder.name))
    return children


def _resident_pages(proc: Path, pid: int) -> int:
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
