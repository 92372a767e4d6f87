"""Writes results to a file: JSON lines, CSV, Parquet or OpenAI batch output. The formats are registered here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO

import orjson

from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus
from batchmill_db.session import Database

from .column_types import as_json
from .export_columns import no_column, there_are
from .export_csv import CSV_COLUMNS, csv_lines
from .export_openai import openai_line
from .export_rows import COLUMNS, Result, stream_fields, stream_results
from .extras import needed_for

__all__ = ["COLUMNS", "FORMATS", "Result", "check_columns", "check_format", "stream_results", "write_results"]

_FLUSH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """What is to be written of which job, and where to."""

    database: Database
    job_id: int
    out: BinaryIO
    statuses: Iterable[RowStatus] | None
    columns: Sequence[str] | None
    excel_safe: bool

    def results(self) -> Iterator[Result]:
        return stream_results(self.database, self.job_id, statuses=self.statuses)


def write_results(
    database: Database,
    job_id: int,
    out: BinaryIO,
    *,
    format: str = "jsonl",
    statuses: Iterable[RowStatus] | None = None,
    columns: Sequence[str] | None = None,
    excel_safe: bool = False,
) -> int:
    """Writes results as ``jsonl``, ``csv``, ``parquet`` or ``openai`` (batch output lines); answers how many rows.

    ``columns`` picks result columns and columns of the input by name. ``excel_safe`` is for CSV, see `csv_lines`. Raises
    ConfigurationError for an unknown format or column, and when the library that a format needs is missing.
    """
    check_format(format, excel_safe=excel_safe)
    export = _Export(
        database=database, job_id=job_id, out=out, statuses=statuses, columns=columns, excel_safe=excel_safe
    )
    return _WRITERS[format](export)


def check_format(format: str, *, excel_safe: bool = False) -> None:
    """Raises ConfigurationError for what `write_results` would refuse, so that it is known before a job runs."""
    if format not in _WRITERS:
        raise ConfigurationError(f"format {format!r} is not known; there are {', '.join(FORMATS)}")
    if excel_safe and format != "csv":
        raise ConfigurationError(f"--excel-safe is for CSV, and the format is {format}; leave it out")
    if format == "parquet":
        with needed_for("Parquet", install="batchmill[parquet]"):
            import_module("pyarrow")


def check_columns(format: str, names: Sequence[str] | None, given: Iterable[str]) -> None:
    """Raises ConfigurationError for a name that neither results have nor the data set, whose first row has ``given``.

    Parquet is not checked: it takes columns that only later rows have.
    """
    own = {"jsonl": COLUMNS, "csv": CSV_COLUMNS}.get(format)
    known = None if own is None else [*own, *given]
    for name in names or ():
        if known is not None and name not in known:
            raise ConfigurationError(f"--columns: there is no column {name!r}; {there_are(name, known)}")


def _write_jsonl(export: _Export) -> int:
    if export.columns is None:
        fields = stream_fields(export.database, export.job_id, export.statuses)
        return _write(export.out, _whole_json_lines(fields))
    return _write(export.out, _json_lines(export.results(), export.columns))


def _write_csv(export: _Export) -> int:
    return _write(export.out, csv_lines(export.results(), export.columns, excel_safe=export.excel_safe)) - 1


def _write_openai(export: _Export) -> int:
    return _write(export.out, map(openai_line, export.results()))


def _write_parquet(export: _Export) -> int:
    from .export_parquet import write_parquet

    return write_parquet(export.database, export.job_id, export.out, statuses=export.statuses, columns=export.columns)


_WRITERS: Mapping[str, Callable[[_Export], int]] = {
    "jsonl": _write_jsonl,
    "csv": _write_csv,
    "parquet": _write_parquet,
    "openai": _write_openai,
}
FORMATS = tuple(_WRITERS)


def _write(out: BinaryIO, lines: Iterable[bytes]) -> int:
    """Writes in large pieces; answers the number of lines."""
    count, held, size = 0, [], 0
    for line in lines:
        held.append(line)
        count += 1
        size += len(line)
        if size >= _FLUSH_BYTES:
            out.write(b"".join(held))
            held, size = [], 0
    out.write(b"".join(held))
    return count


def _whole_json_lines(found: Iterable[tuple[dict[str, Any], bytes]]) -> Iterator[bytes]:
    """All columns, the input spliced in as it was stored."""
    for fields, raw in found:
        yield b'%b,"input":%b}\n' % (orjson.dumps(fields)[:-1], raw)


def _json_lines(found: Iterable[Result], columns: Sequence[str]) -> Iterator[bytes]:
    for r in found:
        yield as_json(_picked(r, columns)).encode() + b"\n"


def _picked(r: Result, columns: Sequence[str]) -> dict[str, Any]:
    given = r.input if any(c not in COLUMNS for c in columns) else {}
    missing = [c for c in columns if c not in COLUMNS and c not in given]
    if missing:
        raise no_column(r, missing[0], given)
    return {c: getattr(r, c) if c in COLUMNS else given[c] for c in columns}
