"""JSON bodies as providers send them: parsed fast when they are right, and saved where they can be when they are not."""

from __future__ import annotations

import json
from typing import Any

import orjson

RAW_CHARS = 2_000
_NOT_JSON: Any = None


def parse(body: bytes) -> Any:
    """The value of a body. Raises ValueError if it is not JSON.

    What orjson refuses is tried once more by the standard library, which takes a byte order mark, lone surrogates and
    bytes that are not UTF-8: a paid answer is not thrown away for one bad character.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body.decode("utf-8-sig", "replace"), parse_constant=_refuse)
    except RecursionError as e:
        raise ValueError("JSON is nested too deep") from e


def parse_lenient(body: bytes) -> Any:
    """The value of a body, or None if it is not JSON."""
    try:
        return parse(body)
    except ValueError:
        return _NOT_JSON


def start_of(body: bytes) -> str:
    """The first 2,000 characters of a body, for people to look at; NUL shown as U+FFFD, so that it can be stored."""
    return body[: 4 * RAW_CHARS].decode("utf-8", "replace")[:RAW_CHARS].replace("\x00", "\ufffd")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
