"""Whether the files of a model are whole: one that a download left off in the middle crashes the library that loads it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from . import gguf

_LFS_POINTER = b"version https://git-lfs.github.com/"  # what a clone without Git LFS has in place of large files
_LONGEST_HEADER = 100_000_000  # of safetensors, by its specification


def cut_short(path: Path) -> str | None:
    """One sentence about the first file of weights at ``path`` that ends too early; None where all are whole.

    So too for what a failed download left in its place: nothing, a page, a pointer of Git LFS. Reads headers alone; what
    cannot be read is left to the library.
    """
    for one in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            size, least, begin = one.stat().st_size, _least_size(one), _begin(one)
        except OSError:
            continue
        if begin == _LFS_POINTER:
            return f"{one.name} is a pointer of Git LFS in place of the file; `git lfs pull` in its folder fetches it"
        if one.suffix == ".gguf" and not begin.startswith(gguf.MAGIC):
            return f"{one.name} is no GGUF file: {_instead(size, begin)}; fetch it again"
        if size < least:
            return f"{one.name} is cut short: it has {size} bytes of at least {least}; fetch it again"
    return None


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER))


def _instead(size: int, begin: bytes) -> str:
    return f"it begins with {begin[:16]!r}" if size else "it is empty"


def _least_size(path: Path) -> int:
    return _of_safetensors(path) if path.suffix == ".safetensors" else gguf.least_size(path)


def _of_safetensors(path: Path) -> int:
    """The end of its last tensor. Source: the safetensors format, eight bytes of length, then a header of JSON."""
    with path.open("rb") as file:
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        header = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(begin) < 8 or len(header) < length <= _LONGEST_HEADER:
        return 8 + length
    try:
        table = json.loads(header)
        ends = [one["data_offsets"][1] for name, one in table.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return 0
