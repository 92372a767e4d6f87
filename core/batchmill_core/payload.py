"""How rows are stored: one JSON line per request and per input, many lines in one zstd frame, and their digest.

Lines are kept as bytes on the way in and out, so that moving a row costs no parsing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson
import zstandard

from .errors import BatchmillError, SourceError
from .request import Request, Row, TaskKind

# Level 1 packs prompts about as well as 3 and is twice as fast; loading a data set is bound by it otherwise.
ZSTD_LEVEL = 1
_INPUT_KEY = b',"input":'
_DIGITS_TO_ZERO = bytes(ord("0") if 0x30 <= b <= 0x39 else b for b in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrigin:
    """Where a row came from, as kept beside its input."""

    line: int | None
    source: str | None
    custom_id: str | None
    sanitized: bool


def encode_request(request: Request) -> bytes:
    """One line of JSON holding what ``Request.as_payload`` keeps."""
    return _dumps(request.as_payload())


def decode_request(line: bytes, *, task: TaskKind) -> Request:
    return Request.from_payload(_loads(line), task=task)


def encode_input(row: Row) -> bytes:
    """One line of JSON: the row's origin, and its input as the last key, see ``split_input``."""
    envelope = {
        "line": row.line,
        "source": row.source,
        "custom_id": row.custom_id,
        "sanitized": row.sanitized,
        "input": row.input,
    }
    return _dumps(envelope)


def split_input(line: bytes) -> tuple[RowOrigin, bytes]:
    """The row's origin, and its input as the JSON bytes that were stored, not parsed.

    A quote inside a JSON string is always escaped, so the first match of the key is the key itself.
    """
    head, _, rest = line.partition(_INPUT_KEY)
    return RowOrigin(**orjson.loads(head + b"}")), rest[:-1]


def encode_frame(lines: Sequence[bytes]) -> bytes:
    """The lines in one zstd frame with a checksum."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(b"\n".join(lines))


def decode_frame(frame: bytes) -> list[bytes]:
    """The lines of a frame, not parsed. Raises BatchmillError when the frame is damaged."""
    try:
        plain = zstandard.ZstdDecompressor().decompress(frame)
    except (zstandard.ZstdError, MemoryError) as error:  # a damaged header may claim any size
        said = f"{error}" or "no such size"
        raise BatchmillError(f"a stored payload is damaged: {said}; check the database's disk") from error
    return plain.split(b"\n") if plain else []


def digest(requests: Sequence[bytes], inputs: Sequence[bytes]) -> str:
    """Hex digest of the content of one payload, independent of how it is compressed (BLAKE2b, 128 bits)."""
    state = blake2b(digest_size=16)
    for lines in (requests, inputs):
        plain = b"\n".join(lines)
        state.update(len(plain).to_bytes(8))
        state.update(plain)
    return state.hexdigest()


def may_hold_long_integer(data: bytes) -> bool:
    """Whether JSON may hold an integer beyond 64 bits, which orjson reads as a float: 20 digits, or a minus and 19."""
    digits = data.translate(_DIGITS_TO_ZERO)
    return b"0" * 20 in digits or b"-" + b"0" * 19 in digits


def _dumps(value: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers beyond 64 bits, or nested deeper than orjson goes
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise SourceError("the row is nested too deeply to be stored") from error


def _loads(line: bytes) -> Any:
    return json.loads(line) if may_hold_long_integer(line) else orjson.loads(line)
