"""The rows of a chunk as they are stored, and those that a damaged payload holds for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchmill_core.errors import BatchmillError
from batchmill_core.job import Rows
from batchmill_core.payload import decode_frame

KIND = "damaged_payload"


@dataclass(slots=True, kw_only=True)
class StoredRows:
    """``lines`` are (row, its request as JSON), in row order; ``damaged`` are rows that no attempt will ever read."""

    lines: list[tuple[int, bytes]] = field(default_factory=list)
    damaged: list[tuple[int, str]] = field(default_factory=list)


def stored_rows(frames: Sequence[tuple[int, int, bytes]], rows: Rows) -> StoredRows:
    """The wanted rows out of payload frames, given as (first row, number of rows, frame) in row order."""
    wanted = set(rows)
    found = StoredRows()
    for first, n_rows, frame in frames:
        asked = [row for row in range(first, first + n_rows) if row in wanted]
        try:
            lines = _whole(frame, n_rows)
        except BatchmillError as error:
            found.damaged += ((row, str(error)) for row in asked)
        else:
            found.lines += ((row, lines[row - first]) for row in asked)
    return found


def _whole(frame: bytes, n_rows: int) -> list[bytes]:
    lines = decode_frame(frame)
    if len(lines) != n_rows:
        raise BatchmillError(
            f"a stored payload is damaged: it has {len(lines)} of {n_rows} rows; check the database's disk"
        )
    return lines
