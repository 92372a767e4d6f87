"""Reading results: which rows have one, a span of them in row order, and their errors by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, literal_column, select

from batchmill_core.job import Rows
from batchmill_core.request import RowStatus

from .schema import result
from .spans import among


def finished(conn: Connection, job_id: int, rows: Rows, round_number: int) -> set[int]:
    """The rows that have a final result of this round or a later one. Reads only."""
    done: set[int] = set()
    for piece in among(result.c.row, rows):
        found = select(result.c.row).where(result.c.job_id == job_id, piece, result.c.round >= round_number)
        done.update(conn.execute(found).scalars())
    return done


def earlier(conn: Connection, job_id: int, rows: Rows, round_number: int) -> dict[int, RowStatus]:
    """The statuses that rows have from earlier rounds. Reads only."""
    statuses: dict[int, RowStatus] = {}
    for piece in among(result.c.row, rows):
        found = select(result.c.row, result.c.status).where(
            result.c.job_id == job_id, piece, result.c.round < round_number
        )
        statuses.update({row: RowStatus(status) for row, status in conn.execute(found)})
    return statuses


EXPORT_COLUMNS = tuple(c for c in result.c if c.name not in ("job_id", "chunk_id", "fence"))


def between(conn: Connection, job_id: int, first_row: int, last_row: int) -> Sequence[Any]:
    """Results of a span of rows in row order, as named tuples of `EXPORT_COLUMNS`. Reads only."""
    return conn.execute(
        select(*EXPORT_COLUMNS)
        .where(result.c.job_id == job_id, result.c.row.between(first_row, last_row))
        .order_by(result.c.row)
    ).all()


NOT_OK = result.c.status != literal_column("'ok'")  # in literals, so that its partial index serves


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSample:
    """How many rows ended with one kind of error, and one of them."""

    kind: str
    count: int
    row: int
    message: str


def errors_by_kind(conn: Connection, job_id: int) -> list[ErrorSample]:
    """Errors by kind with an example each, the most frequent first. Reads only."""
    found: dict[str, tuple[int, int]] = {}  # kind: (rows, the first of them)
    for status in (s for s in RowStatus if s not in (RowStatus.OK, RowStatus.TRUNCATED)):
        # One by one, because then SQLite takes the index of what is not ok.
        groups = conn.execute(
            select(result.c.error_kind, func.count(), func.min(result.c.row))
            .where(result.c.job_id == job_id, NOT_OK, result.c.status == status, result.c.error_kind.is_not(None))
            .group_by(result.c.error_kind)
        )
        for kind, n, row in groups:
            count, first = found.get(kind, (0, row))
            found[kind] = (count + n, min(first, row))
    samples = []
    for kind, (count, row) in sorted(found.items(), key=lambda item: (-item[1][0], item[0])):
        message = conn.execute(
            select(result.c.error).where(result.c.job_id == job_id, result.c.row == row)
        ).scalar_one()
        samples.append(ErrorSample(kind=kind, count=count, row=row, message=message or ""))
    return samples
