"""Statements about payloads: the rows of a job as they were loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import (
    Connection,
    func,
    select,
)

from batchmill_core.job import (
    Rows,
)

from .bulk import insert_for
from .schema import payload


def add_payloads(conn: Connection, job_id: int, payloads: Sequence[tuple[int, int, bytes, bytes, str]]) -> set[int]:
    """Saves rows: (first row, rows, requests frame, inputs frame, digest) each; answers the first rows that were new.

    Idempotent: a payload that is there already is left alone.
    """
    insert_ = insert_for(conn.dialect.name)
    names = ("first_row", "n_rows", "requests", "inputs", "digest")
    values = [{"job_id": job_id, **dict(zip(names, p, strict=True))} for p in payloads]
    statement = insert_(payload).on_conflict_do_nothing().returning(payload.c.first_row)
    return set(conn.execute(statement, values).scalars())


def payload_digests(conn: Connection, job_id: int) -> Iterator[tuple[int, int, str]]:
    """(first row, rows, digest) of what is loaded, in row order, for a loader that resumes."""
    rows = conn.execute(
        select(payload.c.first_row, payload.c.n_rows, payload.c.digest)
        .where(payload.c.job_id == job_id)
        .order_by(payload.c.first_row)
    )
    for r in rows:
        yield r.first_row, r.n_rows, r.digest


def requests_of(conn: Connection, job_id: int, rows: Rows) -> list[tuple[int, int, bytes]]:
    """Payload frames (first row, rows, requests frame) that hold any of these rows, in row order."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for first, last in _coarse(rows):
        # Payloads follow each other without gaps, so the one that holds a row is the last that begins at or before it.
        begin = select(func.max(payload.c.first_row)).where(payload.c.job_id == job_id, payload.c.first_row <= first)
        frames = conn.execute(
            select(payload.c.first_row, payload.c.n_rows, payload.c.requests)
            .where(payload.c.job_id == job_id, payload.c.first_row.between(begin.scalar_subquery(), last))
            .order_by(payload.c.first_row)
        )
        found.update({r.first_row: (r.first_row, r.n_rows, r.requests) for r in frames})
    return [found[first] for first in sorted(found)]


def inputs_after(conn: Connection, job_id: int, first_row: int) -> tuple[int, int, bytes] | None:
    """The first payload at or after this row: (first row, rows, inputs frame); None at the end."""
    found = conn.execute(
        select(payload.c.first_row, payload.c.n_rows, payload.c.inputs)
        .where(payload.c.job_id == job_id, payload.c.first_row >= first_row)
        .order_by(payload.c.first_row)
        .limit(1)
    ).one_or_none()
    return None if found is None else (found.first_row, found.n_rows, found.inputs)


def _coarse(rows: Rows, most: int = 50) -> list[tuple[int, int]]:
    """At most ``most`` ranges that cover the rows, so that a scattered set makes no endless statement."""
    ranges = list(rows.ranges)
    if len(ranges) <= most:
        return ranges
    step = -(-len(ranges) // most)
    return [(ranges[i][0], ranges[min(i + step, len(ranges)) - 1][1]) for i in range(0, len(ranges), step)]
