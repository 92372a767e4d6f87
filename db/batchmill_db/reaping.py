"""Chunks whose worker died or lost its lease: taken back, halved when they crash again and again, given up at last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, literal_column, select, update

from batchmill_core.job import ChunkState, Rows

from . import ledger
from .chunks import Child, Claim, derive, is_cancelled, unattended
from .saved_results import finished
from .schema import chunk
from .session import now_ms

# In literals, so that the partial indexes of `schema` serve them.
_READY = chunk.c.state == literal_column("'ready'")
_LEASED = chunk.c.state == literal_column("'leased'")
_UNSUMMED = func.coalesce(chunk.c.unsummed_since_ms, now_ms())
CRASH_LIMIT = 3


def is_suspect(conn: Connection, chunk_id: int) -> bool:
    """Whether one more crash halves the chunk, or ends its one row: it should run alone, so that none other is blamed."""
    count = conn.execute(select(chunk.c.crash_count).where(chunk.c.id == chunk_id)).scalar_one_or_none()
    return count is not None and count >= CRASH_LIMIT - 1


def expire_leases(conn: Connection, *, worker_ids: Sequence[str]) -> int:
    """Ends the leases of workers known to be dead, so that the next tick reaps them at once. Idempotent."""
    return conn.execute(
        update(chunk).where(_LEASED, chunk.c.lease_owner.in_(worker_ids)).values(lease_until_ms=0)
    ).rowcount


def extend_all(conn: Connection, by_ms: int) -> int:
    """After an outage of the database: gives every live lease time for a beat before any is reaped. Idempotent."""
    least = now_ms() + by_ms
    return conn.execute(
        update(chunk)
        .where(_LEASED, chunk.c.lease_until_ms < least, chunk.c.lease_until_ms > 0)
        .values(lease_until_ms=least)
    ).rowcount


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What became of one chunk whose lease had expired."""

    chunk_id: int
    job_id: int
    crash_count: int
    outcome: str  # ready, split, dead, done, cancelled


def reap(conn: Connection, *, limit: int = 100) -> list[Reaped]:
    """Takes expired leases back: `ready` again, and one more crash counted; a chunk that keeps crashing is halved.

    Each expiry is one conditional update, so a heartbeat in between wins. The dead attempt's reserved calls become
    `unknown`. At `CRASH_LIMIT` a chunk of several rows becomes two children that are halved at their next crash; a
    single row is `dead`. Chunks that wait in the same queues are publishable anew, since a worker that died may have
    taken their messages along. Idempotent: a chunk is reaped once per fence.
    """
    due = conn.execute(
        select(chunk.c.id, chunk.c.fence)
        .where(_LEASED, chunk.c.lease_until_ms < now_ms())
        .order_by(chunk.c.lease_until_ms)
        .limit(limit)
    ).all()
    reaped = [r for r in (_reap_one(conn, chunk_id, fence) for chunk_id, fence in due) if r is not None]
    if reaped:
        queues = select(chunk.c.queue).where(chunk.c.id.in_([r.chunk_id for r in reaped])).distinct()
        conn.execute(
            update(chunk)
            .where(_READY, chunk.c.published_ms.is_not(None), chunk.c.queue.in_(queues))
            .values(published_ms=None)
        )
    return reaped


def crash(conn: Connection, claim: Claim) -> Reaped | None:
    """Gives an attempt up that lost its engine, as if its worker had died: one more crash is counted.

    Fenced. Idempotent: an attempt is given up once; None when it is no longer the owner.
    """
    conn.execute(
        update(chunk)
        .where(chunk.c.id == claim.chunk_id, chunk.c.fence == claim.fence, chunk.c.state == ChunkState.LEASED)
        .values(lease_until_ms=0)
    )
    return _reap_one(conn, claim.chunk_id, claim.fence)


def _reap_one(conn: Connection, chunk_id: int, fence: int) -> Reaped | None:
    taken = conn.execute(
        update(chunk)
        .where(
            chunk.c.id == chunk_id,
            chunk.c.fence == fence,
            chunk.c.state == ChunkState.LEASED,
            chunk.c.lease_until_ms < now_ms(),
        )
        .values(
            state=ChunkState.READY,
            fence=fence + 1,
            crash_count=chunk.c.crash_count + 1,
            published_ms=None,
            not_before_ms=0,
            lease_owner=None,
            lease_until_ms=None,
            last_error="its worker died or lost its lease",
        )
        .returning(chunk.c.job_id, chunk.c.crash_count, chunk.c.rows, chunk.c.queue, chunk.c.step, chunk.c.round)
    ).one_or_none()
    if taken is None:
        return None
    ledger.orphan(conn, chunk_id, fence)
    outcome = "ready"
    if is_cancelled(conn, taken.job_id):
        conn.execute(update(chunk).where(chunk.c.id == chunk_id).values(state=ChunkState.CANCELLED))
        outcome = "cancelled"
    elif taken.crash_count >= CRASH_LIMIT:
        outcome = _isolate(conn, chunk_id, fence + 1, taken)
    return Reaped(chunk_id=chunk_id, job_id=taken.job_id, crash_count=taken.crash_count, outcome=outcome)


def _isolate(conn: Connection, chunk_id: int, fence: int, taken: Any) -> str:
    rows = unfinished(conn, taken.job_id, Rows.parse(taken.rows), taken.round)
    if not rows:
        conn.execute(update(chunk).where(chunk.c.id == chunk_id).values(state=ChunkState.DONE, done_fence=fence))
        return "done"
    if len(rows) == 1:
        _give_up(conn, chunk_id, taken, rows)
        return "dead"
    attempt = unattended(chunk_id, fence, taken, rows)
    halves = [Child(rows=h, queue=taken.queue, step=taken.step, error="halved after crashes") for h in rows.halves()]
    derive(conn, attempt, halves, crash_count=CRASH_LIMIT - 1)
    conn.execute(update(chunk).where(chunk.c.id == chunk_id).values(state=ChunkState.DONE, done_fence=fence))
    return "split"


def _give_up(conn: Connection, chunk_id: int, taken: Any, rows: Rows) -> None:
    """The chunk is `dead`, and so is its row unless it keeps a result of an earlier round."""
    answered = bool(finished(conn, taken.job_id, rows, 0))
    conn.execute(
        update(chunk)
        .where(chunk.c.id == chunk_id)
        .values(
            state=ChunkState.DEAD,
            last_error=f"row {rows.first} brought its worker down {taken.crash_count} times",
            rows=str(rows),
            first_row=rows.first,
            n_rows=1,
            n_dead=chunk.c.n_dead + (0 if answered else 1),
            unsummed_since_ms=_UNSUMMED,
        )
    )


def unfinished(conn: Connection, job_id: int, rows: Rows, round_number: int) -> Rows:
    """The rows that have no final result of this round. Reads only."""
    done = finished(conn, job_id, rows, round_number)
    return Rows.of(n for n in rows if n not in done)


def dead_rows(conn: Connection, job_id: int) -> dict[int, str]:
    """Rows that brought their workers down, with why. One that has a result (of an earlier round) is not dead for it."""
    found = conn.execute(
        select(chunk.c.rows, chunk.c.last_error).where(chunk.c.job_id == job_id, chunk.c.state == ChunkState.DEAD)
    )
    return {n: r.last_error or "" for r in found for n in Rows.parse(r.rows)}


def clear_dead(conn: Connection, job_id: int) -> None:
    """A retry takes the dead rows up again: their old chunks are `done`. Idempotent."""
    conn.execute(
        update(chunk)
        .where(chunk.c.job_id == job_id, chunk.c.state == ChunkState.DEAD)
        .values(state=ChunkState.DONE, n_dead=0, unsummed_since_ms=_UNSUMMED)
    )
