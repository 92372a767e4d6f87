"""Where a server's output is kept, and what it said last."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from batchmill_core.settings import find_folder

_TAIL_BYTES = 8192
_LAST_LINES = 6
_LAST_CHARS = 700
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def log_path(model: str, environment: Mapping[str, str]) -> Path:
    """The file of this slot's server, in the folder where embedded workers have their logs too."""
    slot = environment.get("CUDA_VISIBLE_DEVICES") or "cpu"
    name = _UNSAFE.sub("-", f"server-{model}-{slot}")[:120]
    return find_folder(environment) / ".batchmill" / "logs" / f"{name}.log"


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not there yet, or not to be looked at: starting the server says so
        return 0


def last_words(path: Path, begin: int = 0) -> str:
    """The last lines after byte ``begin``, as one line; empty where nothing was said."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, begin if begin <= size else 0))
            said = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in _COLOUR.sub("", said).splitlines()]
    return " | ".join([line for line in lines if line][-_LAST_LINES:])[-_LAST_CHARS:]
