"""Small chunks of one job and queue become one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, literal_column, select, update

from batchmill_core.job import ChunkState, Rows

from .chunks import Child, derive, unattended
from .schema import chunk
from .session import now_ms

# In literals, so that the partial indexes of `schema` serve them.
_READY = chunk.c.state == literal_column("'ready'")


def merge(conn: Connection, *, limit_rows: int = 1000) -> int:
    """Joins small ready children of the same (job, step, round, queue) that are due; answers how many went away.

    The joined rows live on in one new child of the first; the others become `done`. Chunks that crashed stay apart, so
    that the row at fault is still found. Idempotent per transaction.
    """
    groups = conn.execute(
        select(chunk.c.job_id, chunk.c.step, chunk.c.round, chunk.c.queue)
        .where(
            _READY,
            chunk.c.parent_id.is_not(None),
            chunk.c.crash_count == 0,
            chunk.c.not_before_ms <= now_ms(),
        )
        .group_by(chunk.c.job_id, chunk.c.step, chunk.c.round, chunk.c.queue)
        .having(func.count() > 1)
        .limit(50)
    ).all()
    return sum(_merge_group(conn, g, limit_rows) for g in groups)


def _merge_group(conn: Connection, group: Any, limit_rows: int) -> int:
    members = conn.execute(
        select(chunk.c.id, chunk.c.rows, chunk.c.n_rows, chunk.c.fence)
        .where(
            _READY,
            chunk.c.parent_id.is_not(None),
            chunk.c.crash_count == 0,
            chunk.c.not_before_ms <= now_ms(),
            chunk.c.job_id == group.job_id,
            chunk.c.step == group.step,
            chunk.c.round == group.round,
            chunk.c.queue == group.queue,
        )
        .order_by(chunk.c.id)
        .limit(200)
    ).all()
    taken, size = [], 0
    for m in members:
        if size + m.n_rows <= limit_rows:
            taken.append(m)
            size += m.n_rows
    if len(taken) < 2:
        return 0
    gone = conn.execute(
        update(chunk)
        .where(chunk.c.id.in_([m.id for m in taken]), chunk.c.state == ChunkState.READY)
        .values(state=ChunkState.DONE, last_error="merged", fence=chunk.c.fence + 1)
        .returning(chunk.c.id, chunk.c.rows, chunk.c.fence)
    ).all()
    if not gone:
        return 0
    rows = Rows.of(n for m in gone for n in Rows.parse(m.rows))
    first = min(gone, key=lambda m: m.id)
    attempt = unattended(first.id, first.fence, group, rows)
    derive(conn, attempt, [Child(rows=rows, queue=group.queue, step=group.step)])
    return len(gone) - 1
