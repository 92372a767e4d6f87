"""Reads rows that are already Python objects: mappings, strings, or the rows of a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchmill_core.errors import BatchmillError, SourceError

from .sanitize import UnstorableValue, sanitize
from .source_jsonl import BadLine, Parsed

_FRAME_ROWS = 1000


def read_objects(rows: Any) -> Iterator[Parsed]:
    """Yields a snapshot of each object, numbered from 1; a string ``s`` becomes ``{"text": s}``.

    A data frame is read a thousand rows at a time. What ``rows`` itself raises on the way becomes a SourceError.
    """
    if _is_arrow(rows):
        from .source_arrow import read_stream

        yield from read_stream(rows)
        return
    for number, given in enumerate(_guarded(_frame_rows(rows)), 1):
        row = {"text": given} if isinstance(given, str) else given
        if not isinstance(row, Mapping):
            yield number, BadLine(f"a {type(given).__name__}, not a mapping or a string"), False
            continue
        yield (number, *snapshot(row))


def check_iterable(dataset: object) -> None:
    """Raises SourceError for objects that would iterate as something else than rows."""
    if isinstance(dataset, Mapping):
        raise SourceError("the data set is one mapping; give a list of mappings, one for each row")
    if type(dataset).__name__ == "LazyFrame":
        raise SourceError("the data set is a LazyFrame; give what its .collect() answers")
    if hasattr(dataset, "__arrow_c_stream__"):
        return
    if isinstance(dataset, (bytes, bytearray)) or not isinstance(dataset, Iterable):
        raise SourceError(
            f"the data set is a {type(dataset).__name__}; give a path, an iterable of mappings, or a data frame"
        )


def snapshot(row: Mapping[Any, Any]) -> tuple[dict[str, Any] | BadLine, bool]:
    """A copy of a row that can be stored and whether its text was mended, or why it cannot be, naming the column."""
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


def _guarded(rows: Iterable[Any]) -> Iterator[Any]:
    """The rows; an error of the iterable itself names how far it came, so that the job fails as a whole."""
    iterator, count = iter(rows), 0
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except BatchmillError:
            raise
        except Exception as error:  # it is the caller's code, which may raise anything
            raise SourceError(
                f"the data set failed after {count:,} rows: {type(error).__name__}: {error}; "
                "mend what yields the rows and submit again"
            ) from error
        count += 1
        yield row


def _is_arrow(rows: Any) -> bool:
    """Whether rows are read as Arrow data.

    pandas would convert the whole frame at once, and knows columns of mixed values, which Arrow does not; polars writes
    columns of Python objects as their addresses.
    """
    if not hasattr(rows, "__arrow_c_stream__") or _is_pandas(rows):
        return False
    if not _is_polars(rows):
        return True
    if any(str(kind) in ("Object", "Int128", "UInt128") for kind in rows.dtypes):
        return False
    try:
        import pyarrow  # noqa: F401  # only whether it is there: polars can do without
    except ImportError:
        return False
    return True


def _is_pandas(rows: Any) -> bool:
    return hasattr(rows, "iloc") and hasattr(rows, "to_dict")


def _is_polars(rows: Any) -> bool:
    return hasattr(rows, "iter_rows") and hasattr(rows, "columns")


def _frame_rows(rows: Any) -> Iterable[Any]:
    """Rows of a pandas or polars data frame, which iterate as their columns; anything else as it is."""
    if _is_polars(rows):
        named: Iterable[Any] = rows.iter_rows(named=True)
        return named
    if _is_pandas(rows):
        return _pandas_rows(rows)
    return rows  # type: ignore[no-any-return]  # an Iterable, see check_iterable


def _pandas_rows(frame: Any) -> Iterator[Any]:
    if not hasattr(frame, "columns"):
        raise SourceError("the data set is a pandas Series; give a data frame: series.to_frame('text')")
    names = list(map(str, frame.columns))
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise SourceError(f"the data frame names {', '.join(map(repr, twice))} more than once; rename one of them")
    for start in range(0, len(frame), _FRAME_ROWS):
        yield from _shortest(frame.iloc[start : start + _FRAME_ROWS]).to_dict("records")


def _shortest(part: Any) -> Any:
    """Short floats as the shortest decimals that read back as them; as doubles 0.1 would be 0.10000000149011612."""
    short = [name for name, kind in part.dtypes.items() if str(kind) in ("float32", "float16")]
    return part.assign(**{name: part[name].astype(str).astype("float64") for name in short}) if short else part
