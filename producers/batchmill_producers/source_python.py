"""Reads rows that are already Python objects: mappings, strings, or the rows of a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchmill_core.errors import SourceError

from .sanitize import UnstorableValue, sanitize
from .source_jsonl import BadLine, Parsed

_FRAME_ROWS = 1000


def read_objects(rows: Iterable[Any]) -> Iterator[Parsed]:
    """Yields a snapshot of each object, numbered from 1; a string ``s`` becomes ``{"text": s}``."""
    for number, given in enumerate(_frame_rows(rows), 1):
        row = {"text": given} if isinstance(given, str) else given
        if not isinstance(row, Mapping):
            yield number, BadLine(f"a {type(given).__name__}, not a mapping or a string"), False
            continue
        yield (number, *_snapshot(row))


def check_iterable(dataset: object) -> None:
    """Raises SourceError for objects that would iterate as something else than rows."""
    if isinstance(dataset, Mapping):
        raise SourceError("the data set is one mapping; give a list of mappings, one for each row")
    if isinstance(dataset, (bytes, bytearray)) or not isinstance(dataset, Iterable):
        raise SourceError(f"the data set is a {type(dataset).__name__}; give a path or an iterable of mappings")


def _snapshot(row: Mapping[Any, Any]) -> tuple[dict[str, Any] | BadLine, bool]:
    try:
        return sanitize(row)
    except (UnstorableValue, RecursionError):
        return BadLine(_culprit(row)), False


def _culprit(row: Mapping[Any, Any]) -> str:
    """Which column cannot be stored, and why."""
    for column, value in row.items():
        try:
            sanitize(value)
        except UnstorableValue as error:
            return f"column {column!r}: {error}"
        except RecursionError:
            return f"column {column!r} is nested too deeply"
    return "it cannot be written as JSON"


def _frame_rows(rows: Any) -> Iterable[Any]:
    """Rows of a pandas or polars data frame, which iterate as their columns; anything else as it is."""
    if hasattr(rows, "iter_rows") and hasattr(rows, "columns"):
        named: Iterable[Any] = rows.iter_rows(named=True)
        return named
    if hasattr(rows, "iloc") and hasattr(rows, "to_dict"):
        return _pandas_rows(rows)
    return rows  # type: ignore[no-any-return]  # an Iterable, see check_iterable


def _pandas_rows(frame: Any) -> Iterator[Any]:
    for start in range(0, len(frame), _FRAME_ROWS):
        yield from frame.iloc[start : start + _FRAME_ROWS].to_dict("records")
