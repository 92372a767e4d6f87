"""Reads JSON Lines: one object per line, parsed from bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from batchmill_core.payload import may_hold_long_integer

from .sanitize import sanitize
from .source_bytes import whole_lines


@dataclass(frozen=True, slots=True)
class BadLine:
    """Why a line gives no row."""

    reason: str


# What every reader yields: the 1-based line, the row or why there is none, and whether its text had to be mended.
Parsed = tuple[int, "dict[str, Any] | BadLine", bool]

_KINDS = {str: "string", int: "number", float: "number", bool: "boolean", list: "list", type(None): "null"}


def read_jsonl(blocks: Iterable[bytes]) -> Iterator[Parsed]:
    """Yields each line that is not blank. A repeated key keeps its last value, as in every JSON library at hand."""
    number = 0
    for piece in whole_lines(blocks):
        piece_is_suspect = is_suspect(piece)
        for number, raw in enumerate(piece.splitlines(), number + 1):  # noqa: B020  # counts across pieces
            if not raw or raw.isspace():
                continue
            if not (piece_is_suspect and is_suspect(raw)):
                try:
                    value = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    pass
                else:
                    yield number, value if type(value) is dict else not_an_object(value), False
                    continue
            yield (number, *parse_line(raw))


def is_suspect(data: bytes) -> bool:
    """Whether orjson could lose something here: NUL escapes pass through it, long integers come back as floats."""
    return b"\\u0000" in data or may_hold_long_integer(data)


def parse_line(raw: bytes) -> tuple[dict[str, Any] | BadLine, bool]:
    """Parses one line with care: integers of any size, lone surrogates and NUL; tells what is wrong in words."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return BadLine(not_utf8(error)), False
    value: Any
    try:
        value = careful_loads(text)
    except json.JSONDecodeError as error:
        return BadLine(_syntax_reason(text, error)), False
    except (ValueError, RecursionError) as error:
        return BadLine(nesting_or(error)), False
    return as_row(value)


def as_row(value: Any) -> tuple[dict[str, Any] | BadLine, bool]:
    """A parsed value as a row, with its text mended, or why it is none."""
    if not isinstance(value, dict):
        return not_an_object(value), False
    try:
        return sanitize(value)
    except RecursionError as error:
        return BadLine(nesting_or(error)), False


def careful_loads(text: str) -> Any:
    """``json.loads`` that refuses NaN and infinities. A raw NUL inside a string is taken like its escape."""
    return careful_decoder.decode(text.strip(" \t\r\n").replace("\0", "\\u0000"))


def not_utf8(error: UnicodeDecodeError) -> str:
    return (
        f"byte 0x{error.object[error.start]:02x} at offset {error.start} of the line is not UTF-8; "
        "if the file is in another encoding, name it, for example --encoding latin-1"
    )


def nesting_or(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _syntax_reason(text: str, error: json.JSONDecodeError) -> str:
    if text.count("\0") > len(text) // 4:
        return "full of NUL bytes; if the file is UTF-16, read it with --encoding utf-16-le"
    return f"not valid JSON: {error.msg} at column {error.pos + 1}{_hint(text.strip(), error)}"


def _hint(text: str, error: json.JSONDecodeError) -> str:
    """What to do about the usual reasons why a line is no JSON."""
    if text.startswith("["):
        return "; a file that is one JSON array must be named .json"
    if text == "{" or (text.startswith("{") and error.pos >= len(text)):
        return "; an object has to stand on one line (as `jq -c .` writes it)"
    if text.startswith("{") and text.endswith("},") and error.msg == "Extra data":
        return "; take out the comma at the end of the line"
    if text[:1] not in ("{", '"') and "," in text:
        return "; a file of comma-separated values must be named .csv"
    return ""


def not_an_object(value: object) -> BadLine:
    kind = _KINDS.get(type(value), type(value).__name__)
    hint = f'; write {{"text": {json.dumps(value)[:60]}}}' if isinstance(value, str) and len(value) < 50 else ""
    if isinstance(value, list):
        hint = "; a file that is one JSON array must be named .json"
    return BadLine(f"a JSON {kind}, not an object{hint}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON; write null")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _integer(text: str) -> int:
    # Python refuses to parse more than 4300 digits, with a message about its own settings.
    if len(text) > 4300:
        raise ValueError("a number has more than 4300 digits")
    return int(text)


careful_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer)
