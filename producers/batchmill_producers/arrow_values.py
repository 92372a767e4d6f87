"""Turns columns of Arrow data into JSON's values: each type has one form, the same in every format and in data frames.

Numbers and booleans stay what they are (a shorter float becomes the shortest decimal that reads back as itself), null and
NaN become None, dates and times ISO 8601, decimals plain digits, binary base64, lists, structs and maps lists and objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from struct import pack
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as is_a

from batchmill_core.errors import SourceError

from .sanitize import BadValue, bytes_text, decimal_text, duration_text, sanitize_text
from .source_jsonl import BadLine
from .source_python import snapshot
from .time_text import BEYOND, PER_SECOND, date_text, interval_text, time_text, timestamp_text, zone_of

ROWS_AT_ONCE = 1000
_MS_PER_DAY = 86_400_000


def column_names(schema: pa.Schema, *, where: str) -> list[str]:
    """The names of the columns. Raises SourceError when there is none or one is there twice."""
    try:
        names = [sanitize_text(name) for name in schema.names]
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} has a column name that is not UTF-8: {error}; write it again") from error
    if not names:
        raise SourceError(f"{where} has no columns")
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise SourceError(f"{where} names {', '.join(map(repr, twice))} more than once; rename one of them")
    return names


def batch_rows(batch: pa.RecordBatch, names: list[str]) -> Iterator[tuple[dict[str, Any] | BadLine, bool]]:
    """The rows of a batch, and whether text in them had to be mended. Converts about a thousand rows at once."""
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        part = batch.slice(start, ROWS_AT_ONCE)
        reading = _Reading()
        columns = [reading.column(name, column) for name, column in zip(names, part.columns, strict=True)]
        rows = (dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True))
        if reading.suspect:
            yield from map(snapshot, rows)
        else:
            yield from ((row, False) for row in rows)


class _Reading:
    """Converts columns; ``suspect`` is set when a value needs a second look: NaN, infinity, NUL, or unreadable."""

    def __init__(self) -> None:
        self.suspect = False

    def column(self, name: str, array: pa.Array) -> list[Any]:
        try:
            return self.values(array)
        except (pa.ArrowException, LookupError, ValueError, OverflowError) as error:
            raise SourceError(f"column {name!r} of type {array.type} cannot be read: {error}") from error

    def values(self, array: pa.Array) -> list[Any]:
        for fits, convert in _CONVERTERS:
            if fits(array.type):
                return convert(self, array)
        self.suspect = True  # unions and what comes later: Python's own values, cleaned one by one
        found: list[Any] = array.to_pylist()
        return found

    def plain(self, array: pa.Array) -> list[Any]:
        found: list[Any] = array.to_pylist()
        return found

    def floats(self, array: pa.Array) -> list[Any]:
        if is_a.is_float16(array.type):
            array = pa.array(map(_shortest_half, array.cast(pa.float64()).to_pylist()), pa.float64())
        elif not is_a.is_float64(array.type):
            array = array.cast(pa.string()).cast(pa.float64())
        if pc.all(pc.is_finite(array)).as_py() is False:
            self.suspect = True
        return self.plain(array)

    def texts(self, array: pa.Array) -> list[Any]:
        try:
            found: list[Any] = array.to_pylist()
        except UnicodeDecodeError:
            self.suspect = True
            return [_text(v) for v in _as_binary(array).to_pylist()]
        if any(v is not None and "\0" in v for v in found):
            self.suspect = True
        return found

    def mapped(self, array: pa.Array, form: Callable[[Any], Any]) -> list[Any]:
        found = [None if v is None else form(v) for v in array.to_pylist()]
        if BEYOND in found:
            self.suspect = True
        return found

    def timestamps(self, array: pa.Array) -> list[Any]:
        form = partial(timestamp_text, per_second=PER_SECOND[array.type.unit], zone=zone_of(array.type.tz))
        return self.mapped(array.cast(pa.int64()), form)

    def times(self, array: pa.Array) -> list[Any]:
        form = partial(time_text, per_second=PER_SECOND[array.type.unit])
        return self.mapped(array.cast(pa.int32() if is_a.is_time32(array.type) else pa.int64()), form)

    def durations(self, array: pa.Array) -> list[Any]:
        ns = PER_SECOND["ns"] // PER_SECOND[array.type.unit]
        return self.mapped(array.cast(pa.int64()), lambda n: duration_text(n * ns))

    def lists(self, array: pa.Array) -> list[Any]:
        return list(_regrouped(self.values(array.flatten()), pc.list_value_length(array).to_pylist()))

    def maps(self, array: pa.Array) -> list[Any]:
        kind = array.type
        pairs = pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
        found = self.lists(array.cast(pairs))
        return [None if entries is None else _object(entries) for entries in found]

    def structs(self, array: pa.Array) -> list[Any]:
        names = [array.type.field(i).name for i in range(array.type.num_fields)]
        if len(set(names)) != len(names):
            raise ValueError("two of its fields have the same name")
        if any("\0" in n for n in names):
            self.suspect = True
        if not names:
            return [{} if there else None for there in array.is_valid().to_pylist()]
        children = zip(*(self.values(child) for child in array.flatten()), strict=True)
        valid = array.is_valid().to_pylist()
        return [dict(zip(names, c, strict=True)) if there else None for there, c in zip(valid, children, strict=True)]

    def coded(self, array: pa.Array) -> list[Any]:
        """Of a dictionary that is longer than the rows at hand only the values in use are converted."""
        codes, words = array.indices.to_pylist(), array.dictionary
        if len(words) <= len(codes):
            meaning: Any = self.values(words)
        else:
            meaning = {c: self.values(words.slice(c, 1))[0] for c in set(codes) if c is not None}
        return [None if c is None else meaning[c] for c in codes]

    def extended(self, array: pa.Array) -> list[Any]:
        if str(getattr(array.type, "extension_name", "")) == "arrow.uuid":
            return [None if v is None else str(v) for v in array.to_pylist()]
        return self.values(array.storage)


_Converter = Callable[[_Reading, pa.Array], list[Any]]


def _any(*fits: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: any(f(kind) for f in fits)


def _form(form: Callable[[Any], Any], *, via: pa.DataType | None = None) -> _Converter:
    return lambda reading, array: reading.mapped(array if via is None else array.cast(via), form)


def _as_binary(array: pa.Array) -> pa.Array:
    return array.cast(pa.large_binary())


def _text(value: bytes | None) -> Any:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        return BadValue(f"byte 0x{value[error.start]:02x} at offset {error.start} of its text is not UTF-8")  # type: ignore[index]  # None has no bytes to be wrong


def _regrouped(values: list[Any], lengths: Iterable[int | None]) -> Iterator[list[Any] | None]:
    at = 0
    for length in lengths:
        if length is None:
            yield None
        else:
            yield values[at : at + length]
            at += length


def _shortest_half(value: float | None) -> float | None:
    """The shortest decimal that reads back as the same float16: five digits always do."""
    if value is None or not math.isfinite(value) or value.is_integer():
        return value
    tries = (float(f"{value:.{digits}g}") for digits in range(1, 6))
    return next((t for t in tries if pack("e", t) == pack("e", value)), value)


def _object(entries: list[dict[str, Any]]) -> Any:
    """An object where every key is a text and there once, else the list of its entries."""
    keys = [e["key"] for e in entries]
    if all(isinstance(k, str) for k in keys) and len(set(keys)) == len(keys):
        return {e["key"]: e["value"] for e in entries}
    return entries


_CONVERTERS: tuple[tuple[Callable[[pa.DataType], bool], _Converter], ...] = (
    (_any(is_a.is_null, is_a.is_boolean, is_a.is_integer), _Reading.plain),
    (is_a.is_floating, _Reading.floats),
    (_any(is_a.is_string, is_a.is_large_string, is_a.is_string_view), _Reading.texts),
    (
        _any(is_a.is_binary, is_a.is_large_binary, is_a.is_fixed_size_binary, is_a.is_binary_view),
        _form(bytes_text),
    ),
    (is_a.is_decimal, _form(decimal_text)),
    (is_a.is_date32, _form(date_text, via=pa.int32())),
    (is_a.is_date64, _form(lambda ms: date_text(ms // _MS_PER_DAY), via=pa.int64())),
    (is_a.is_timestamp, _Reading.timestamps),
    (is_a.is_time, _Reading.times),
    (is_a.is_duration, _Reading.durations),
    (is_a.is_interval, _form(interval_text)),
    (is_a.is_dictionary, _Reading.coded),
    (is_a.is_run_end_encoded, lambda reading, array: reading.values(pc.run_end_decode(array))),
    (is_a.is_struct, _Reading.structs),
    (is_a.is_map, _Reading.maps),
    (
        _any(is_a.is_list, is_a.is_large_list, is_a.is_fixed_size_list, is_a.is_list_view, is_a.is_large_list_view),
        _Reading.lists,
    ),
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _Reading.extended),
)
