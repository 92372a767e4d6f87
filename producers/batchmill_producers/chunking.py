"""Splits a stream of rows into groups that are stored and answered together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.errors import SourceError
from batchmill_core.payload import digest, encode_frame, encode_input, encode_request
from batchmill_core.request import Request, Row

MAX_CHUNK_BYTES = 8_000_000
CHUNK_SECONDS = 7.5  # the middle of the 5 to 10 s that a chunk should take
MAX_CHUNK_ROWS = 1000
MIN_CHUNK_ROWS = 8
GPU_CHUNK_ROWS = 64
# What a call is taken to need where nothing is known of it yet.
_GUESSED_CALL_SECONDS = 2.0
_GUESSED_CALL_TOKENS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One row as it is stored: a line of JSON for its request and one for its input."""

    request: bytes
    input: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.request) + len(self.input)


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Consecutive rows of a job, packed into the two frames that are stored, with the digest of their content."""

    first_row: int
    n_rows: int
    requests: bytes
    inputs: bytes
    digest: str


def pack_row(row: Row, request: Request) -> PackedRow:
    """Raises SourceError naming the row when it cannot be written as JSON."""
    try:
        return PackedRow(request=encode_request(request), input=encode_input(row))
    except (SourceError, RecursionError) as error:
        at = f"row {row.index}" if row.line is None else f"{row.source} line {row.line}"
        what = "nested too deeply to be stored" if isinstance(error, RecursionError) else error
        raise SourceError(f"{at}: {what}") from error


def size_chunks(
    rows: Iterable[PackedRow], *, rows_per_chunk: int, max_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[list[PackedRow]]:
    """Groups consecutive rows; a group ends at ``rows_per_chunk`` rows, or before it would pass ``max_bytes``.

    A row larger than ``max_bytes`` is a group of its own. Holds one group at a time.
    """
    group: list[PackedRow] = []
    held = 0
    for row in rows:
        size = row.n_bytes
        if group and (len(group) >= rows_per_chunk or held + size > max_bytes):
            yield group
            group, held = [], 0
        group.append(row)
        held += size
    if group:
        yield group


def pack_payload(first_row: int, group: Sequence[PackedRow]) -> Payload:
    """The frames of one group."""
    return Payload(
        first_row=first_row,
        n_rows=len(group),
        requests=encode_frame([row.request for row in group]),
        inputs=encode_frame([row.input for row in group]),
        digest=digest_of(group),
    )


def digest_of(group: Sequence[PackedRow]) -> str:
    """The same rows give the same digest, whatever their compression."""
    return digest([row.request for row in group], [row.input for row in group])


def default_chunk_size(entry: ModelEntry, account: Account | None, *, capacity_rows: int = GPU_CHUNK_ROWS) -> int:
    """Rows that take about 7.5 s: large enough to amortise a claim, small enough to share out and to take over.

    A device gets at least its engine's capacity (``capacity_rows``), so that one chunk can fill its batch. An account
    gets what its narrowest limit lets through in that time, assuming calls of 2 s and 500 tokens, 8 to 1000 rows.
    """
    if account is None:
        return max(GPU_CHUNK_ROWS, capacity_rows)
    rates = [account.max_in_flight / _GUESSED_CALL_SECONDS]
    for limits in (account.limits, entry.limits):
        if limits.requests_per_second is not None:
            rates.append(limits.requests_per_second)
        if limits.requests_per_minute is not None:
            rates.append(limits.requests_per_minute / 60)
        if limits.tokens_per_minute is not None:
            rates.append(limits.tokens_per_minute / 60 / _GUESSED_CALL_TOKENS)
    return max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, round(min(rates) * CHUNK_SECONDS)))
