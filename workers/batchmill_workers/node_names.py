"""Node names that are one process's alone on a host, also where two installations share a broker, and stay the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from itertools import chain, count
from pathlib import Path

from batchmill_db.telemetry import WorkerRecord

_SILENT_MS = 60_000  # a number of a process that gave no beat for as long may be another's by now


def mark_of(home: Path) -> str:
    """Four letters that tell this installation from others on the host, always the same for its folder."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:4]


def distinct(name: str, taken: Collection[str], *, mark: str) -> str:
    """The name, or where somebody has it ``gpu0-3f2a``, made of it and of the installation's mark."""
    candidates: Iterable[str] = chain((name, f"{name}-{mark}"), (f"{name}-{mark}-{n}" for n in count(2)))
    return next(one for one in candidates if one not in taken)


def taken_names(workers: Iterable[WorkerRecord]) -> set[str]:
    """Names, without their host, of those of this host's workers that still live."""
    return {w.name.partition("@")[0] for w in workers if w.age_ms < _SILENT_MS and _lives(w.pid)}


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
