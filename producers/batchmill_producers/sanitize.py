"""Makes data storable: NUL and lone surrogates become U+FFFD, and values that JSON has no word for are translated.

PostgreSQL refuses NUL in text, and a lone surrogate has no UTF-8 form, so both would fail long after the row was read.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import orjson

REPLACEMENT = "\ufffd"
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_MAX_PLAIN_EXPONENT = 400
_NANOSECONDS = 1_000_000_000


class UnstorableValue(ValueError):
    """A value that has no faithful form in JSON."""


class BadValue:
    """Stands in a row for a value that could not be read; ``sanitize`` refuses it with this reason."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def sanitize_text(text: str) -> str:
    """The text with every NUL and lone surrogate replaced by U+FFFD; the same object when there is none."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSTORABLE.sub(REPLACEMENT, text)


def decimal_text(value: Decimal) -> str | None:
    """All digits without an exponent, trailing zeros kept: ``1.50``. None for NaN. Raises UnstorableValue for infinity."""
    if not value.is_finite():
        if value.is_nan():
            return None
        raise UnstorableValue("infinity cannot be written as JSON")
    return format(value, "f") if abs(value.adjusted()) <= _MAX_PLAIN_EXPONENT else str(value)


def duration_text(nanoseconds: int) -> str:
    """An ISO 8601 duration in seconds, exact: ``PT90S``, ``-PT0.5S``."""
    seconds, rest = divmod(abs(nanoseconds), _NANOSECONDS)
    fraction = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{'-' if nanoseconds < 0 else ''}PT{seconds}{fraction}S"


def bytes_text(value: bytes | bytearray | memoryview) -> str:
    """Bytes as base64."""
    return base64.b64encode(value).decode()


def sanitize(value: Any) -> tuple[Any, bool]:
    """A copy of ``value`` made of JSON's types only, and whether any text in it (keys too) had to be mended.

    NaN and pandas' NaT and NA, which mark missing values in tables, become None; dates and times become ISO 8601,
    decimals plain digits, bytes base64; UUIDs, enums, numpy values and dataclasses what orjson writes for them. Raises
    UnstorableValue for infinities and for objects JSON cannot hold.
    """
    cleaner = _Cleaner()
    return cleaner.clean(value), cleaner.mended


class _Cleaner:
    __slots__ = ("mended",)

    def __init__(self) -> None:
        self.mended = False

    def clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(str(value))
        if value is None or type(value) is int or type(value) is bool:
            return value
        if isinstance(value, float):
            return _number(float(value))
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, (list, tuple)):
            return [self.clean(v) for v in value]
        return self._foreign(value)

    def _mapping(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        cleaned = {self._text(str(k)): self.clean(v) for k, v in value.items()}
        if len(cleaned) != len(value):
            raise UnstorableValue("two of its keys are the same when written as text")
        return cleaned

    def _text(self, text: str) -> str:
        mended = sanitize_text(text)
        if mended is not text:
            self.mended |= mended != text
        return mended

    def _foreign(self, value: Any) -> Any:
        if isinstance(value, date | time):
            return None if value != value else value.isoformat()  # pandas' NaT is a date unequal to itself
        if isinstance(value, timedelta):
            return None if value != value else duration_text(_timedelta_ns(value))
        if isinstance(value, Decimal):
            return decimal_text(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes_text(value)
        if isinstance(value, BadValue):
            raise UnstorableValue(value.reason)
        if type(value).__name__ in ("NAType", "NaTType"):  # pandas' NA and NaT
            return None
        if type(value).__name__ == "ndarray" and value.dtype.kind in "OUS":  # lists of texts in a pandas cell
            return self.clean(value.tolist())
        try:
            encoded = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise UnstorableValue(
                f"a value of type {type(value).__name__} cannot be written as JSON; convert it to text or a number"
            ) from error
        return self.clean(orjson.loads(encoded))


def _timedelta_ns(value: timedelta) -> int:
    whole: int = (value.days * 86_400 + value.seconds) * _NANOSECONDS + value.microseconds * 1000
    return whole + getattr(value, "nanoseconds", 0)  # pandas' timedelta has them beyond the microseconds


def _number(value: float) -> float | None:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return None
    raise UnstorableValue("infinity cannot be written as JSON")
