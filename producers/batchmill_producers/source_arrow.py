"""Reads Arrow data: IPC files (Feather) and streams, and anything that hands over an Arrow stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from batchmill_core.errors import SourceError

from .arrow_values import batch_rows, column_names
from .source_bytes import BLOCK_BYTES, decompressed
from .source_jsonl import Parsed
from .source_parts import Location, Part

_FILE_MAGIC = b"ARROW1"
_FILE_HEAD_BYTES = 8  # the magic, padded; what follows is a stream, and then a footer with the magic again
_FEATHER_1_MAGIC = b"FEA1"


def arrow_part(location: Location) -> Part:
    """An IPC file or stream, which may be compressed as a whole."""
    return Part(name=location.name, read=lambda: read_arrow(location), where=lambda row: f"{location.shown} row {row}")


def read_stream(rows: Any) -> Iterator[Parsed]:
    """Yields the rows of an object with ``__arrow_c_stream__``, numbered from 1, a batch at a time."""
    try:
        with pa.RecordBatchReader.from_stream(rows) as reader:
            yield from _rows(reader, where=f"the {type(rows).__name__}")
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"the {type(rows).__name__} cannot be read as a table: {error}; give a data frame or a pyarrow.Table"
        ) from error


def read_arrow(location: Location) -> Iterator[Parsed]:
    """Yields the rows of an IPC file or stream, numbered from 1. Raises SourceError naming the record batch.

    A plain file is mapped into memory, since a single batch can be as large as the file.
    """
    with ExitStack() as files:
        source = _Blocks(location, files)
        is_file = source.starts_with(_FILE_MAGIC)
        if source.starts_with(_FEATHER_1_MAGIC):
            raise SourceError(f"{location.shown} is Feather version 1; write it again as version 2")
        mapped = _mapped(location, files, is_file=is_file) if source.is_plain else None
        if mapped is None and is_file:
            source.read(_FILE_HEAD_BYTES)
        stream = files.enter_context(pa.PythonFile(source, mode="r")) if mapped is None else mapped
        try:
            yield from _rows(pa.ipc.open_stream(stream), where=location.shown, untrusted=True)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{location.shown} is not Arrow data, or damaged: {error}; write it again") from error
        if is_file and mapped is None and not source.drained().endswith(_FILE_MAGIC):
            raise _cut_short(location)


def _rows(reader: Any, *, where: str, untrusted: bool = False) -> Iterator[Parsed]:
    names = column_names(reader.schema, where=where)
    row = 0
    for number, batch in enumerate(_batches(reader, where=where)):
        if untrusted:
            _check(batch, where=f"{where} record batch {number}")
        try:
            for row, (value, mended) in enumerate(batch_rows(batch, names), row + 1):  # noqa: B020  # counts on
                yield row, value, mended
        except SourceError as error:
            raise SourceError(f"{where} record batch {number}: {error}") from error


def _batches(reader: Any, *, where: str) -> Iterator[Any]:
    number = 0
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{where} record batch {number} cannot be read: {error}; write it again") from error
        yield batch
        number += 1


def _check(batch: Any, *, where: str) -> None:
    """Offsets that point outside of their buffer would end the process, not raise."""
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise SourceError(f"{where} is damaged: {error}; write the file again") from error


def _mapped(location: Location, files: ExitStack, *, is_file: bool) -> Any:
    """A local file in memory, past its head; None where it is not a local one."""
    if location.path is None:
        return None
    mapped = files.enter_context(pa.memory_map(str(location.path)))
    if is_file:
        mapped.seek(max(0, mapped.size() - len(_FILE_MAGIC)))
        if mapped.size() < _FILE_HEAD_BYTES or mapped.read() != _FILE_MAGIC:
            raise _cut_short(location)
        mapped.seek(_FILE_HEAD_BYTES)
    return mapped


def _cut_short(location: Location) -> SourceError:
    return SourceError(f"{location.shown} is cut short: its Arrow footer is missing; fetch or write it again")


class _Blocks:
    """What pyarrow reads from: the decompressed blocks of a location as one stream."""

    closed = False

    def __init__(self, location: Location, files: ExitStack) -> None:
        raw = files.enter_context(location.opened())
        self._blocks, self.is_plain = decompressed(raw, name=location.shown, must_be=location.suffix)
        self._held = b""
        self._tail = b""

    def starts_with(self, magic: bytes) -> bool:
        self._fill(_FILE_HEAD_BYTES)
        return self._held.startswith(magic)

    def read(self, size: int) -> bytes:
        self._fill(size)
        given, self._held = self._held[:size], self._held[size:]
        return given

    def drained(self) -> bytes:
        """Takes what is left; answers the last bytes of it."""
        while block := self.read(BLOCK_BYTES):
            self._tail = (self._tail + block)[-_FILE_HEAD_BYTES:]
        return self._tail

    def close(self) -> None:
        """The location closes itself."""

    def _fill(self, size: int) -> None:
        parts, held = [self._held], len(self._held)
        while held < size and (block := next(self._blocks, None)) is not None:
            parts.append(block)
            held += len(block)
        self._held = b"".join(parts)
