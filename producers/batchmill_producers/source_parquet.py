"""Reads Parquet files, a thousand rows of one row group at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchmill_core.errors import SourceError

from .arrow_values import ROWS_AT_ONCE, batch_rows, column_names
from .source_bytes import COMPRESSED_SUFFIXES, decompressed
from .source_jsonl import Parsed
from .source_parts import Location, Part

# Column chunks are read piece by piece through this much, since one can be as large as its whole row group.
_BUFFER_BYTES = 1 << 20
_FAULTS = (pa.ArrowException, OSError, UnicodeDecodeError)


def parquet_part(location: Location) -> Part:
    """A Parquet file; errors name the row and its row group."""
    parquet = _Parquet(location)
    return Part(name=location.name, read=parquet.read, where=parquet.where)


class _Parquet:
    """One file, and which row group the rows last read are in."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._group = 0

    def where(self, row: int) -> str:
        return f"{self._location.shown} row group {self._group} row {row}"

    def read(self) -> Iterator[Parsed]:
        """Yields the rows, numbered from 1. Raises SourceError naming the row group and the column."""
        shown = self._location.shown
        with self._location.opened() as given, _unpacked(given, self._location) as raw:
            file = self._open(raw)
            names = column_names(file.schema_arrow, where=shown)
            row = 0
            for self._group in range(file.num_row_groups):
                for batch in self._batches(file):
                    try:
                        for row, (value, mended) in enumerate(batch_rows(batch, names), row + 1):  # noqa: B020  # on
                            yield row, value, mended
                    except SourceError as error:
                        raise SourceError(f"{shown} row group {self._group}: {error}") from error

    def _open(self, raw: Any) -> Any:
        try:
            return pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        except _FAULTS as error:
            raise SourceError(
                f"{self._location.shown} is not a Parquet file, or cut short: {error}; fetch or write it again"
            ) from error

    def _batches(self, file: Any) -> Iterator[Any]:
        try:
            yield from file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[self._group], use_threads=False)
        except _FAULTS as error:
            column = self._culprit(file)
            raise SourceError(
                f"{self._location.shown} row group {self._group}{column} cannot be read: {error}; "
                "the file is damaged, so fetch or write it again"
            ) from error

    def _culprit(self, file: Any) -> str:
        """Which column of the row group is the damaged one, where one alone shows it."""
        for name in file.schema_arrow.names:
            try:
                for _ in file.iter_batches(
                    batch_size=ROWS_AT_ONCE, row_groups=[self._group], columns=[name], use_threads=False
                ):
                    pass
            except _FAULTS:
                return f", column {name!r},"
        return ""


@contextmanager
def _unpacked(raw: BinaryIO, location: Location) -> Iterator[BinaryIO]:
    """The file itself, or a temporary one with what is packed in it, since Parquet is read from its end."""
    if location.suffix not in COMPRESSED_SUFFIXES:
        yield raw
        return
    blocks, _ = decompressed(raw, name=location.shown, must_be=location.suffix)
    with tempfile.TemporaryFile() as plain:
        try:
            plain.writelines(blocks)
        except OSError as error:
            raise SourceError(
                f"{location.shown} cannot be unpacked in {tempfile.gettempdir()}: {error}; free space or set TMPDIR"
            ) from error
        plain.seek(0)
        yield plain
