"""Opens a data set and streams its rows, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from batchmill_core.errors import SourceError
from batchmill_core.request import Request, Row, TaskKind

from .openai_batch import InvalidBatchLine, batch_request, is_batch_line
from .seen_ids import SeenIds
from .source_bytes import check_encoding
from .source_files import file_parts
from .source_jsonl import BadLine
from .source_parts import Part
from .source_python import check_iterable, read_objects

KEPT_BAD_ROWS = 1000
# An id is remembered with one number for its file and line.
_LINES_PER_PART = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that was left out: the line it stood on (for tables and Python objects: which row, from 1), and why.

    Of a data set of several files the reason begins with the file's name.
    """

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
    """A data set ready to be streamed.

    A path, folder, pattern or URL, ``-`` for JSON Lines on standard input, an iterable of mappings, or a data frame. No
    row is read yet, but what does not exist or has no known suffix raises SourceError at once.
    """
    check_encoding(encoding)
    if limit is not None and limit < 1:
        raise SourceError(f"the limit is {limit}; it must be at least 1")
    name: str | None
    if isinstance(dataset, (str, Path)):
        name, parts = file_parts(dataset, encoding=encoding)
    else:
        check_iterable(dataset)
        name, parts = None, [Part(name=None, read=lambda: read_objects(dataset), where=lambda row: f"row {row}")]
    once = isinstance(dataset, Iterator) or name == "stdin" or hasattr(dataset, "read_next_batch")
    return Source(parts, name=name, once=once, limit=limit, skip_bad_rows=skip_bad_rows, id_column=id_column)


class Source:
    """Rows of one data set. Iterating streams them; a file can be iterated again, stdin and generators cannot.

    ``name`` is the file's, folder's or pattern's name (``stdin``; None for Python objects). ``bad_rows`` lists the first 1000 rows that
    ``skip_bad_rows`` left out, ``bad_row_count`` counts them all; both belong to the latest iteration.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        name: str | None,
        once: bool,
        limit: int | None,
        skip_bad_rows: bool,
        id_column: str | None,
    ) -> None:
        self.name = name
        self.bad_rows: list[BadRow] = []
        self.bad_row_count = 0
        self._parts = parts
        self._at = 0  # the part that the latest row came from
        self._first_bad = ""
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
        return tuple(self.first_row.input)

    @property
    def task(self) -> TaskKind | None:
        """What an OpenAI batch file asks for; None when rows are data, which need a prompt."""
        request = self.first_row.request
        return None if request is None else request.task

    @property
    def skips_bad_rows(self) -> bool:
        """Whether bad rows are left out instead of refusing the data set."""
        return self._skip_bad_rows

    def reject(self, line: int | None, reason: str) -> None:
        """Notes a bad row when they are skipped, else raises SourceError naming the line and the fix.

        ``line`` is that of the row which iterating gave last, or of one that it could not give.
        """
        at = "a row" if line is None else self._part.where(line)
        if not self._skip_bad_rows:
            raise SourceError(f"{at}: {reason}. Mend it, or leave such rows out with --skip-bad-rows")
        self.bad_row_count += 1
        if self.bad_row_count == 1:
            self._first_bad = f"{at}: {reason}"
        if self.bad_row_count <= KEPT_BAD_ROWS:
            where = f"{self._part.name}: " if len(self._parts) > 1 else ""
            self.bad_rows.append(BadRow(line=line or 0, reason=where + reason))

    @property
    def _part(self) -> Part:
        return self._parts[self._at]

    @property
    def first_input(self) -> Mapping[str, Any]:
        """The first row as its source gave it. Raises as iterating does, if no row was read yet."""
        return self.first_row.input

    @property
    def first_row(self) -> Row:
        """The first row. Raises as iterating does, if no row was read yet."""
        if self._first is None:
            rows = iter(self)
            self._first = next(rows)
            self._peeked = self._first, rows
        return self._first

    def _rows(self) -> Iterator[Row]:
        self.bad_rows, self.bad_row_count = [], 0
        index = 0
        for line, value, mended, custom_id, request in self._identified():
            source = self._part.name
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
        parsed = self._good()
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

    def _good(self) -> Iterator[tuple[int, dict[str, Any], bool]]:
        for at, part in enumerate(self._parts):
            self._at = at
            for line, value, mended in part.read():
                if isinstance(value, BadLine):
                    self.reject(line, value.reason)
                else:
                    yield line, value, mended

    def _check_new(self, seen: SeenIds, custom_id: str, line: int) -> None:
        earlier = seen.add(custom_id, self._at * _LINES_PER_PART + line)
        if earlier is None:
            return
        at, earlier_line = divmod(earlier, _LINES_PER_PART)
        unit = "row" if self.name is None else "line"
        file = "" if at == self._at else f" of {self._parts[at].name}"
        raise _BadId(f"id {custom_id!r} was already on {unit} {earlier_line}{file}; ids must be unique")

    def _no_rows(self) -> NoReturn:
        bad = ""
        if self.bad_rows:
            bad = f"; {self.bad_row_count} bad rows were left out, the first at {self._first_bad}"
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
