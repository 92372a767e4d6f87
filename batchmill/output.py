"""Where results are written: a file that appears whole or not at all, or standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus
from batchmill_db.session import Database
from batchmill_producers.export import check_format, write_results

Format = Literal["jsonl", "csv", "parquet", "openai"]
_BY_SUFFIX: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_STDOUT = "-"


class ReaderGone(Exception):
    """Who read our standard output has had enough. No OSError, which typer would make an exit code of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where to, in what format and which columns. ``path`` None is standard output."""

    path: Path | None
    format: Format
    columns: Sequence[str] | None = None
    excel_safe: bool = False

    def write(self, database: Database, job_id: int, *, statuses: Iterable[RowStatus] | None = None) -> int:
        """Writes the results of a job in row order; answers how many."""
        with _open(self.path) as out:
            return write_results(
                database,
                job_id,
                out,
                format=self.format,
                statuses=statuses,
                columns=self.columns,
                excel_safe=self.excel_safe,
            )


def output_of(path: str | None, format: Format | None, columns: str | None, *, excel_safe: bool = False) -> Output:
    """The output that options describe, checked before any work is done. Raises ConfigurationError."""
    to = None if path in (None, _STDOUT) else Path(str(path))
    if to is not None and to.is_dir():
        raise ConfigurationError(f"--output {to} is a folder; give the name of a file")
    if to is not None and not os.access(to.parent, os.W_OK):
        what = "cannot be written" if to.parent.is_dir() else "does not exist"
        raise ConfigurationError(f"--output {to}: the folder {to.parent} {what}")
    names = None if columns is None else [c.strip() for c in columns.split(",") if c.strip()]
    if names == []:
        raise ConfigurationError("--columns is empty; write for example --columns row,status,output")
    chosen = _format(to, format)
    check_format(chosen, excel_safe=excel_safe)
    if chosen == "parquet" and to is None and sys.stdout.isatty():
        raise ConfigurationError("Parquet is not for a terminal; add -o FILE.parquet")
    return Output(path=to, format=chosen, columns=names, excel_safe=excel_safe)


def _format(path: Path | None, given: Format | None) -> Format:
    if given is not None:
        return given
    if path is None:
        return "jsonl"
    if path.suffix not in _BY_SUFFIX:
        raise ConfigurationError(
            f"--output {path}: its suffix names no format; add --format jsonl, csv, parquet or openai"
        )
    return _BY_SUFFIX[path.suffix]


@contextmanager
def _open(path: Path | None) -> Iterator[BinaryIO]:
    """A file under another name until it is complete: a reader never sees half of it."""
    if path is None:
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError as fault:
            raise ReaderGone from fault
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as out:
            yield out
        unfinished.replace(path)
    except OSError as fault:
        raise ConfigurationError(f"--output {path} cannot be written: {fault.strerror}") from fault
    finally:
        unfinished.unlink(missing_ok=True)
