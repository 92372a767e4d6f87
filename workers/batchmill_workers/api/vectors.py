"""Embedding vectors as they come, numbers or base64, turned into float32 little-endian bytes in the right order."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from typing import Any

_FLOAT32_BYTES = 4


def vectors_of(data: Any, count: int) -> tuple[bytes, ...]:
    """The ``data`` of an embedding answer as one vector per input, in the order of the inputs.

    Raises ValueError if they are not exactly one per input and of one length: vectors are never shifted.
    """
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise ValueError("data is not a list of objects")
    if len(data) != count:
        raise ValueError(f"{len(data)} vectors for {count} inputs")
    indexes = [item.get("index", place) for place, item in enumerate(data)]
    if any(type(i) is not int for i in indexes) or sorted(indexes) != list(range(count)):
        raise ValueError("their indexes are not those of the inputs")
    vectors = [b""] * count
    for i, item in zip(indexes, data, strict=True):
        vectors[i] = _vector(item.get("embedding"))
    if len({len(v) for v in vectors}) > 1:
        raise ValueError("vectors of different lengths")
    return tuple(vectors)


def _vector(embedding: Any) -> bytes:
    if isinstance(embedding, list):
        packed = _packed(embedding)
    elif isinstance(embedding, str):
        packed = _unpacked(embedding)
    else:
        raise ValueError("a vector is neither numbers nor base64")
    if not packed:
        raise ValueError("a vector is empty")
    return packed


def _packed(numbers: list[Any]) -> bytes:
    """Numbers as float32; JSON has none that are not finite, and struct refuses those too large."""
    try:
        return struct.pack(f"<{len(numbers)}f", *numbers)
    except (struct.error, OverflowError) as e:
        raise ValueError(f"a vector is not of numbers: {e}") from e


def _unpacked(text: str) -> bytes:
    """Base64 of float32 little-endian bytes, which are what is kept."""
    packed = base64.b64decode(text, validate=True)  # its binascii.Error is a ValueError
    if len(packed) % _FLOAT32_BYTES:
        raise ValueError("a vector is cut")
    if not math.isfinite(sum(array("f", packed))):
        raise ValueError("a vector has numbers that are not finite")
    return packed
