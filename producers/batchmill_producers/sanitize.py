"""Makes data storable: NUL and lone surrogates become U+FFFD, and values that JSON has no word for are translated.

PostgreSQL refuses NUL in text, and a lone surrogate has no UTF-8 form, so both would fail long after the row was read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import orjson

REPLACEMENT = "\ufffd"
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class UnstorableValue(ValueError):
    """A value that has no faithful form in JSON."""


def sanitize_text(text: str) -> str:
    """The text with every NUL and lone surrogate replaced by U+FFFD; the same object when there is none."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSTORABLE.sub(REPLACEMENT, text)


def sanitize(value: Any) -> tuple[Any, bool]:
    """A copy of ``value`` made of JSON's types only, and whether any text in it (keys too) had to be mended.

    NaN and pandas' NaT and NA, which mark missing values in tables, become None; dates and decimals become text; UUIDs,
    enums, numpy values and dataclasses what orjson writes for them. Raises UnstorableValue for infinities and for
    objects JSON cannot hold.
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
        if isinstance(value, Decimal):
            return str(value)
        if type(value).__name__ == "NAType":  # pandas' NA
            return None
        try:
            encoded = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise UnstorableValue(
                f"a value of type {type(value).__name__} cannot be written as JSON; convert it to text or a number"
            ) from error
        return self.clean(orjson.loads(encoded))


def _number(value: float) -> float | None:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return None
    raise UnstorableValue("infinity cannot be written as JSON")
