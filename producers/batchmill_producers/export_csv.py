"""Results as CSV: result columns, then the input's columns as the first row has them."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from batchmill_core.usage import TOKEN_KINDS

from .column_types import as_json
from .export_columns import INPUT, no_column, without_clashes
from .export_rows import COLUMNS, Result

_TOKEN_COLUMNS = {f"{kind}_tokens": kind for kind in TOKEN_KINDS}
_RESULT_COLUMNS = (*(c for c in COLUMNS if c not in (INPUT, "usage")), *_TOKEN_COLUMNS)
CSV_COLUMNS = (*COLUMNS, *_TOKEN_COLUMNS)  # those of results that can be picked
_CRLF = "\r\n"
# What a spreadsheet may take for a formula, https://owasp.org/www-community/attacks/CSV_Injection
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_lines(found: Iterator[Result], columns: Sequence[str] | None, *, excel_safe: bool = False) -> Iterator[bytes]:
    """A header, then a line per row.

    With ``excel_safe`` a text that begins like a formula (``= + - @``, tab, carriage return), the header's too, gets an
    apostrophe in front, so that a spreadsheet shows it instead of running it. Numbers stay as they are.
    """
    first = next(found, None)
    given = () if first is None else tuple(first.input)
    form = _safe_cell if excel_safe else _cell
    names = (*_RESULT_COLUMNS, *without_clashes(given, _RESULT_COLUMNS)) if columns is None else tuple(columns)
    line = _Line()
    yield line.of(map(form, names))
    if first is None:
        return
    for r in itertools.chain([first], found):
        yield line.of(_cells(r, given, form) if columns is None else _picked_cells(r, columns, form))


class _Line:
    """Writes one line at a time; a cell that holds either character of a line end is quoted."""

    def __init__(self) -> None:
        self._text = io.StringIO()
        # The writer quotes the characters of its own line end only, hence both of them here.
        self._writer = csv.writer(self._text, lineterminator=_CRLF)

    def of(self, cells: Iterable[str]) -> bytes:
        self._text.seek(0)
        self._text.truncate()
        self._writer.writerow(cells)
        return self._text.getvalue().removesuffix(_CRLF).encode() + b"\n"


_Form = Callable[[Any], str]


def _cells(r: Result, given: Sequence[str], form: _Form) -> Iterator[str]:
    row = r.input
    yield from (form(_of_result(r, name)) for name in _RESULT_COLUMNS)
    yield from (form(row.get(name)) for name in given)


def _picked_cells(r: Result, names: Sequence[str], form: _Form) -> Iterator[str]:
    row = r.input
    return (form(_picked(r, row, name)) for name in names)


def _picked(r: Result, row: Mapping[str, Any], name: str) -> Any:
    if name in COLUMNS or (name in _TOKEN_COLUMNS and name not in row):
        return _of_result(r, name)
    if name not in row:
        raise no_column(r, name, row)
    return row[name]


def _of_result(r: Result, name: str) -> Any:
    if name in _TOKEN_COLUMNS:
        return None if r.usage is None else r.usage[_TOKEN_COLUMNS[name]]
    return getattr(r, name)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return as_json(value)


def _safe_cell(value: Any) -> str:
    text = _cell(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA_STARTS) else text
