"""Opens a data set and streams its rows, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from batchmill_core.errors import SourceError
from batchmill_core.request import Request, Row, TaskKind

from .openai_batch import InvalidBatchLine, batch_request, is_batch_line
from .seen_ids import SeenIds
from .source_bytes import check_encoding
from .source_files import Reader, file_reader
from .source_jsonl import BadLine, Parsed
from .source_python import check_iterable, read_objects

KEPT_BAD_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that was left out: the line it stood on (for Python objects: which one, from 1), and why."""

    line: int
    reason: str


def open_source(
    dataset: str | Path | Iterable[Any],
    *,
    encoding: str = "utf-8",
    limit: int | None = None,
    skip_bad_rows: bool = False,
    id_column: str | None = None,
) -> Source:
    """A data set ready to be streamed: a path, ``-`` for JSON Lines on standard input, or an iterable of mappings.

    Nothing is read yet, but a path that does not exist or has no known suffix raises SourceError at once.
    """
    check_encoding(encoding)
    if limit is not None and limit < 1:
        raise SourceError(f"the limit is {limit}; it must be at least 1")
    if isinstance(dataset, (str, Path)):
        name, where, read = file_reader(dataset, encoding=encoding)
    else:
        check_iterable(dataset)
        name, where, read = None, "row", lambda: read_objects(dataset)
    once = isinstance(dataset, Iterator) or str(dataset) == "-"
    return Source(
        read, name=name, where=where, once=once, limit=limit, skip_bad_rows=skip_bad_rows, id_column=id_column
    )


class Source:
    """Rows of one data set. Iterating streams them; a file can be iterated again, stdin and generators cannot.

    ``name`` is the file's name (``stdin``; None for Python objects). ``bad_rows`` lists the first 1000 rows that
    ``skip_bad_rows`` left out, ``bad_row_count`` counts them all; both belong to the latest iteration.
    """

    def __init__(
        self,
        read: Reader,
        *,
        name: str | None,
        where: str,
        once: bool,
        limit: int | None,
        skip_bad_rows: bool,
        id_column: str | None,
    ) -> None:
        self.name = name
        self.bad_rows: list[BadRow] = []
        self.bad_row_count = 0
        self._read = read
        self._where = where
        self._once = once
        self._limit = limit
        self._skip_bad_rows = skip_bad_rows
        self._id_column = id_column
        self._first: Row | None = None
        self._peeked: tuple[Row, Iterator[Row]] | None = None
        self._was_read = False

    def __iter__(self) -> Iterator[Row]:
        """Streams the rows. Raises SourceError for a bad row, unless they are skipped, and when there is no row."""
        if self._peeked:
            (first, rest), self._peeked = self._peeked, None
            return chain([first], rest)
        if self._once and self._was_read:
            raise SourceError(f"{self.name or 'the data set'} can be read only once; give a file or a list")
        self._was_read = True
        return self._rows()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the first row. Raises as iterating does."""
        return tuple(self._first_row().input)

    @property
    def task(self) -> TaskKind | None:
        """What an OpenAI batch file asks for; None when rows are data, which need a prompt."""
        request = self._first_row().request
        return None if request is None else request.task

    def reject(self, line: int | None, reason: str) -> None:
        """Notes a bad row when they are skipped, else raises SourceError naming the line and the fix."""
        at = f"{self._where} {line}" if line is not None else self._where
        if not self._skip_bad_rows:
            raise SourceError(f"{at}: {reason}. Mend it, or leave such rows out with --skip-bad-rows")
        self.bad_row_count += 1
        if self.bad_row_count <= KEPT_BAD_ROWS:
            self.bad_rows.append(BadRow(line=line or 0, reason=reason))

    @property
    def first_input(self) -> Mapping[str, Any]:
        """The first row as its source gave it. Raises as iterating does, if no row was read yet."""
        return self._first_row().input

    def _first_row(self) -> Row:
        if self._first is None:
            rows = iter(self)
            self._first = next(rows)
            self._peeked = self._first, rows
        return self._first

    def _rows(self) -> Iterator[Row]:
        self.bad_rows, self.bad_row_count = [], 0
        index = 0
        source = self.name
        for line, value, mended, custom_id, request in self._identified():
            yield Row(
                index=index,
                input=value,
                source=source,
                line=None if source is None else line,
                custom_id=custom_id,
                request=request,
                sanitized=mended,
            )
            index += 1
            if index == self._limit:
                return
        if index == 0:
            self._no_rows()

    def _identified(self) -> Iterator[_Identified]:
        """Good rows, with their request where the first one shows an OpenAI batch file, and their id."""
        parsed = self._good(self._read())
        first = next(parsed, None)
        if first is None:
            return
        is_batch = is_batch_line(first[1])
        rows = chain([first], parsed)
        id_column = self._id_column or ("custom_id" if is_batch else None)
        if id_column is None:
            yield from ((line, value, mended, None, None) for line, value, mended in rows)
            return
        with SeenIds() as seen:
            for line, value, mended in rows:
                try:
                    request = batch_request(value) if is_batch else None
                    custom_id = _custom_id(value, id_column)
                    self._check_new(seen, custom_id, line)
                except (InvalidBatchLine, _BadId) as error:
                    self.reject(line, str(error))
                else:
                    yield line, value, mended, custom_id, request

    def _good(self, parsed: Iterator[Parsed]) -> Iterator[tuple[int, dict[str, Any], bool]]:
        for line, value, mended in parsed:
            if isinstance(value, BadLine):
                self.reject(line, value.reason)
            else:
                yield line, value, mended

    def _check_new(self, seen: SeenIds, custom_id: str, line: int) -> None:
        earlier = seen.add(custom_id, line)
        if earlier is not None:
            unit = "row" if self.name is None else "line"
            raise _BadId(f"id {custom_id!r} was already on {unit} {earlier}; ids must be unique")

    def _no_rows(self) -> NoReturn:
        bad = ""
        if self.bad_rows:
            first = self.bad_rows[0]
            bad = f"; {self.bad_row_count} bad rows were left out, the first at {self._where} {first.line}: {first.reason}"
        raise SourceError(f"{self.name or 'the data set'} has no rows{bad}")


_Identified = tuple[int, dict[str, Any], bool, str | None, Request | None]


class _BadId(ValueError):
    """A row whose id is missing, unusable or not new."""


def _custom_id(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise _BadId(f"there is no id column {column!r}; columns here: {', '.join(row) or 'none'}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        raise _BadId(f"the id column {column!r} holds {str(value)[:60]!r}; an id must be a text or a number")
    return str(value)
