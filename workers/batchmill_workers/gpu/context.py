"""How many tokens a model's context holds, read from its own files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 1 << 24
# Value types of GGUF's metadata and their struct codes. Source: the GGUF specification, ggml docs/gguf.md.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def context_tokens(path: Path) -> int | None:
    """The context window that a GGUF file or a model folder's config.json names; None where neither says."""
    if path.is_dir():
        return _of_folder(path)
    try:
        return _of_gguf(path)
    except (OSError, OverflowError, struct.error):  # broken: loading it says so better
        return None


def _of_folder(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        found = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(found, int):
            return found
    return None


def _of_gguf(path: Path) -> int | None:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            return None
        _version, _tensors, entries = struct.unpack("<IQQ", file.read(20))
        for _ in range(entries):
            key = _read_string(file)
            (kind,) = struct.unpack("<I", file.read(4))
            if key.endswith(b".context_length") and kind in _SCALARS:
                return int(_read_scalar(file, kind))
            _skip(file, kind)
    return None


def _read_scalar(file: BinaryIO, kind: int) -> int | float:
    code = "<" + _SCALARS[kind]
    value: int | float = struct.unpack(code, file.read(struct.calcsize(code)))[0]
    return value


def _read_string(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST_STRING:
        raise struct.error(f"a string of {length} bytes")
    return file.read(length)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _read_string(file)
    elif kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner in _SCALARS:
            file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
        else:
            for _ in range(count):
                _skip(file, inner)
    else:
        _read_scalar(file, kind)
