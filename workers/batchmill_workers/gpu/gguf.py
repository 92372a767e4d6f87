"""What a GGUF file says of its model, ahead of its weights. Source: the GGUF specification, ggml docs/gguf.md."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 1 << 24
_LONGEST_ARRAY = 4096  # of what is read: one number per layer
_NOT_THE_MODEL = ("general", "tokenizer")
# Value types of the metadata and their struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The keys of the model's architecture, without its name in front: ``block_count``, ``attention.head_count``, ….

    Numbers and short lists of numbers only. They are written before the tokenizer, which is not read: its lists are
    long. Empty where the file is no GGUF file or is broken: loading it says so better.
    """
    try:
        with path.open("rb") as file:
            return _read(file) if file.read(4) == _MAGIC else {}
    except (OSError, OverflowError, struct.error):
        return {}


def _read(file: BinaryIO) -> dict[str, Any]:
    _version, _tensors, entries = struct.unpack("<IQQ", file.read(20))
    found: dict[str, Any] = {}
    for _ in range(entries):
        area, _, name = _read_string(file).decode(errors="replace").partition(".")
        if area == "tokenizer" and found:
            break
        (kind,) = struct.unpack("<I", file.read(4))
        value = _read_value(file, kind)
        if name and area not in _NOT_THE_MODEL and isinstance(value, int | float | list):
            found[name] = value
    return found


def _read_value(file: BinaryIO, kind: int) -> Any:
    """A number, a string or a short list of numbers; None for a list that is skipped."""
    if kind == _STRING:
        return _read_string(file).decode(errors="replace")
    if kind != _ARRAY:
        return _read_scalar(file, kind)
    inner, count = struct.unpack("<IQ", file.read(12))
    if inner == _ARRAY:
        raise struct.error("a list of lists, which no model has")
    if inner not in _SCALARS:
        for _ in range(count):
            _read_value(file, inner)
        return None
    if count <= _LONGEST_ARRAY:
        return [_read_scalar(file, inner) for _ in range(count)]
    file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
    return None


def _read_scalar(file: BinaryIO, kind: int) -> int | float:
    if kind not in _SCALARS:
        raise struct.error(f"a value of the unknown type {kind}")
    code = "<" + _SCALARS[kind]
    value: int | float = struct.unpack(code, file.read(struct.calcsize(code)))[0]
    return value


def _read_string(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > _LONGEST_STRING:
        raise struct.error(f"a string of {length} bytes")
    return file.read(length)
