"""Which one type the values of each column have, seen row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import orjson

_INT64 = range(-(2**63), 2**63)
_UINT64 = range(2**64)
_EXACT_IN_FLOAT = range(-(2**53), 2**53 + 1)
_NUMBERS = frozenset({int, float})


class JsonType(Enum):
    """Types that no Python type stands for."""

    JSON = "json"  # values of several types, or lists and objects: each is written as JSON text
    BIG = "big"  # integers from 0 to 2**64 - 1


class ColumnTypes:
    """Sees rows, then tells the type of each column: bool, int (64 bits), float, str or one of JsonType."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[type]] = {}
        self._ranges: dict[str, tuple[int, int]] = {}

    def see(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            kinds = self._kinds.setdefault(name, set())
            if value is None:
                continue
            kind = type(value)
            kinds.add(kind)
            if kind is int:
                low, high = self._ranges.get(name, (value, value))
                self._ranges[name] = min(low, value), max(high, value)

    def found(self) -> dict[str, type | JsonType]:
        """The types of the columns in the order in which they appeared. One without any value is text."""
        return {name: self._type(name, kinds) for name, kinds in self._kinds.items()}

    def _type(self, name: str, kinds: set[type]) -> type | JsonType:
        if not kinds:
            return str
        low, high = self._ranges.get(name, (0, 0))
        if kinds == {int}:
            if low in _INT64 and high in _INT64:
                return int
            return JsonType.BIG if low in _UINT64 and high in _UINT64 else JsonType.JSON
        if kinds == _NUMBERS and low in _EXACT_IN_FLOAT and high in _EXACT_IN_FLOAT:
            return float
        return next(iter(kinds)) if len(kinds) == 1 and kinds <= {bool, float, str} else JsonType.JSON


def as_json(value: Any) -> str:
    """A value as JSON text."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # integers beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
