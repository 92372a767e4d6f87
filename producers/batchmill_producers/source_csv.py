"""Reads CSV and TSV: a header, then one row per record; cells are strings, and may hold line ends."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from batchmill_core.errors import SourceError

from .sanitize import sanitize_text
from .source_bytes import whole_lines
from .source_jsonl import BadLine, Parsed, not_utf8

if TYPE_CHECKING:
    from _csv import Reader

_OTHER_SEPARATORS = (";", "\t", "|")
_SAYS_SEPARATOR = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)
MAX_CELL_CHARS = 512 * 1024 * 1024


def read_csv(blocks: Iterable[bytes], *, name: str, delimiter: str) -> Iterator[Parsed]:
    """Yields each record with the line on which it starts. Raises SourceError for a header that cannot be used.

    Quoting is strict, because a stray quote otherwise swallows the rows behind it without a word.
    """
    _allow_large_cells()
    lines = _Lines(blocks)
    head, delimiter, is_told = _separated(iter(lines), delimiter)
    records = _records(lines, csv.reader(head, delimiter=delimiter, strict=True), name=name)
    if is_told:
        next(records)
    header = _header(records, name=name)
    width = len(header)
    for line, cells, mended in records:
        if isinstance(cells, BadLine):
            yield line, cells, False
        elif len(cells) == width:
            yield line, dict(zip(header, cells, strict=True)), mended
        elif any(cell.strip() for cell in cells):
            yield line, BadLine(_wrong_width(len(cells), width)), False


def _separated(lines: Iterator[str], given: str) -> tuple[Iterator[str], str, bool]:
    """All lines, what separates their cells, and whether the first one does nothing but say so, as Excel writes it.

    A .csv whose header has no comma is separated by what the header does have, as spreadsheets do it where a comma
    stands in numbers.
    """
    blank: list[str] = []
    for line in lines:
        lines = chain([*blank, line], lines)
        if told := _SAYS_SEPARATOR.fullmatch(line):
            return lines, told[1], True
        if line.strip():
            found = max(_OTHER_SEPARATORS, key=line.count)
            return lines, found if given == "," and "," not in line and found in line else given, False
        blank.append(line)
    return iter(blank), given, False


_Record = tuple[int, "list[str] | BadLine", bool]


def _records(lines: _Lines, reader: Reader, *, name: str) -> Iterator[_Record]:
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, BadLine(_quoting_reason(error, start, reader.line_num, name=name)), False
            continue
        fault, mended = lines.take()
        if fault:
            yield start, BadLine(fault), False
        elif cells:
            yield start, [sanitize_text(c) for c in cells] if mended else cells, mended


class _Lines:
    """Decoded lines for csv.reader, with what was wrong in those it took since ``take`` was last called.

    A fault cannot be raised from here: csv.reader would lose its place, and the row could not be skipped.
    """

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._lines = (line for piece in whole_lines(blocks) for line in piece.splitlines(keepends=True))
        self._fault: str | None = None
        self._has_nul = False

    def __iter__(self) -> Iterator[str]:
        for raw in self._lines:
            if b"\0" in raw:
                self._has_nul = True
            try:
                yield raw.decode()
            except UnicodeDecodeError as error:
                self._fault = self._fault or not_utf8(error)
                yield raw.decode(errors="replace")

    def take(self) -> tuple[str | None, bool]:
        taken = self._fault, self._has_nul
        self._fault, self._has_nul = None, False
        return taken


def _header(records: Iterator[_Record], *, name: str) -> list[str]:
    for line, cells, _ in records:
        if isinstance(cells, BadLine):
            raise SourceError(f"{name} line {line}: the header cannot be read: {cells.reason}")
        return _column_names(cells, where=f"{name} line {line}")
    return []


def _column_names(cells: list[str], *, where: str) -> list[str]:
    """Names as written, without blanks around them; a column without a name (pandas' index) is ``column_N``."""
    if not any(cell.strip() for cell in cells):
        raise SourceError(f"{where}: the header names no column; the first line must hold the column names")
    names = [cell.strip() or f"column_{i}" for i, cell in enumerate(cells, 1)]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise SourceError(f"{where}: the header names {', '.join(map(repr, twice))} more than once; rename one of them")
    return names


def _wrong_width(cells: int, columns: int) -> str:
    hint = "; quote cells that hold the delimiter" if cells > columns else ""
    return f"{cells} cells where the header names {columns} columns{hint}"


def _quoting_reason(error: csv.Error, start: int, end: int, *, name: str) -> str:
    message = str(error)
    if "field limit" in message:
        raise SourceError(
            f"{name} line {start}: a cell is larger than {MAX_CELL_CHARS:,} characters; is a quote never closed?"
        ) from error
    if "unexpected end of data" in message:
        return f"a quoted cell that starts here is never closed, which takes everything up to line {end}"
    return f"bad quoting ({message}); write a quote inside a quoted cell twice"


def _allow_large_cells() -> None:
    # csv's limit is one for the process and 128 KB by default; it is only ever raised.
    if csv.field_size_limit() < MAX_CELL_CHARS:
        csv.field_size_limit(MAX_CELL_CHARS)
