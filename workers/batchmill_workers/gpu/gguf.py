"""What a GGUF file says of its model, ahead of its weights. Source: the GGUF specification, ggml docs/gguf.md."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_LONGEST_STRING = 1 << 24
_LONGEST_ARRAY = 4096  # of what is read: one number per layer
_NOT_THE_MODEL = ("general", "tokenizer")
_MOST_DIMENSIONS = 8
# Weights of a block and bytes of a block, by the tensor's type.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 20: (32, 18), 24: (1, 1),
    25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2), 39: (32, 17),
}  # fmt: skip
# Value types of the metadata and their struct codes.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The keys of the model's architecture, without its name in front: ``block_count``, ``attention.head_count``, ….

    Numbers and short lists of numbers only. They are written before the tokenizer, which is not read: its lists are
    long. Empty where the file is no GGUF file or is broken: loading it says so better.
    """
    try:
        with path.open("rb") as file:
            return _read(file) if file.read(4) == MAGIC else {}
    except (OSError, OverflowError, struct.error):
        return {}


def architecture(path: Path) -> str | None:
    """The name of the model's architecture, such as ``llama``; None where the file does not say."""
    try:
        with path.open("rb") as file:
            entries = _entries(file) if file.read(4) == MAGIC else iter(())
            return next((str(value) for name, value in entries if name == "general.architecture"), None)
    except (OSError, OverflowError, struct.error):
        return None


def least_size(path: Path) -> int:
    """Bytes that the file has at least when it is whole, by its table of tensors; 0 for what is no GGUF file.

    One byte more than there are where it ends within its header. Raises OSError.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            return 0
        try:
            return _end_of_tensors(file)
        except (OverflowError, struct.error):
            size = path.stat().st_size
            return size + 1 if file.tell() >= size else 0


def _end_of_tensors(file: BinaryIO) -> int:
    (tensors,) = struct.unpack("<4xQ8x", file.read(20))
    file.seek(4)
    aligned = [value for name, value in _entries(file) if name == "general.alignment"]
    align = aligned[0] if aligned and isinstance(aligned[0], int) and aligned[0] > 0 else 32
    end = 0
    for _ in range(tensors):
        _read_string(file)
        (n_dims,) = struct.unpack("<I", file.read(4))
        if n_dims > _MOST_DIMENSIONS:
            raise struct.error(f"a tensor of {n_dims} dimensions")
        *shape, kind, offset = struct.unpack(f"<{n_dims}QIQ", file.read(8 * n_dims + 12))
        per_block, block_bytes = _BLOCKS.get(kind, (1, 0))
        end = max(end, offset + math.prod(shape) // per_block * block_bytes)
    return -(-file.tell() // align) * align + end if end else file.tell()


def _read(file: BinaryIO) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in _entries(file):
        area, _, name = key.partition(".")
        if area == "tokenizer" and found:
            break
        if name and area not in _NOT_THE_MODEL and isinstance(value, int | float | list):
            found[name] = value
    return found


def _entries(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Keys and values of the metadata, as ``_read_value`` reads them."""
    (entries,) = struct.unpack("<12xQ", file.read(20))
    for _ in range(entries):
        name = _read_string(file).decode(errors="replace")
        (kind,) = struct.unpack("<I", file.read(4))
        yield name, _read_value(file, kind)


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
