"""Statements about chunks: add, claim, heartbeat, release, derive, count.

A chunk is a set of row numbers of its job. Whoever claims it raises its fence; every later write of that attempt names
the fence, so that a worker that lost its lease cannot move the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, literal_column, select, update

from batchmill_core.job import CONTRACT_VERSION, ChunkState, JobState, Rows

from . import ledger
from .bulk import insert_for
from .schema import chunk, job, round_
from .session import now_ms

# In literals, so that the partial indexes of `schema` serve them.
_READY = chunk.c.state == literal_column("'ready'")
_LEASED = chunk.c.state == literal_column("'leased'")
_OPEN = job.c.state == literal_column("'open'")
_UNSUMMED = func.coalesce(chunk.c.unsummed_since_ms, now_ms())


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One attempt: the right to write for a chunk while ``fence`` stays."""

    chunk_id: int
    fence: int
    job_id: int
    job_name: str
    rows: Rows
    queue: str
    step: int
    round: int
    spec: str  # JSON of core.job.Spec
    budgeted: bool
    fresh: bool  # nothing of these rows was tried before in this round


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """Rows that an attempt hands on: to whom (queue, step) and not before when."""

    rows: Rows
    queue: str
    step: int
    wait_ms: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    rows: Rows
    queue: str
    step: int = 0
    round: int = 1
    priority: int = 5


def add(conn: Connection, job_id: int, chunks: Iterable[NewChunk]) -> None:
    """Inserts ready chunks that have no parent. Not idempotent: the caller's payloads of the same transaction are."""
    values = [
        {
            "job_id": job_id,
            "rows": str(c.rows),
            "first_row": c.rows.first,
            "n_rows": len(c.rows),
            "queue": c.queue,
            "step": c.step,
            "round": c.round,
            "priority": c.priority,
            "contract": CONTRACT_VERSION,
            "state": ChunkState.READY,
        }
        for c in chunks
    ]
    if values:
        conn.execute(insert(chunk).values(created_ms=now_ms()), values)


def claim(conn: Connection, chunk_id: int, worker_id: str, *, lease_ms: int) -> Claim | None:
    """Takes a ready chunk of an open job for ``lease_ms``; None when it is not to be had.

    One conditional update: of any number of workers that are told of the chunk, one gets it. A lost answer is healed by
    the lease. A chunk of a newer contract than this code knows stays for workers that know it.
    """
    job_is_open = select(job.c.id).where(job.c.id == chunk.c.job_id, job.c.state == JobState.OPEN).exists()
    taken = conn.execute(
        update(chunk)
        .where(
            chunk.c.id == chunk_id,
            chunk.c.state == ChunkState.READY,
            chunk.c.not_before_ms <= now_ms(),
            chunk.c.contract <= CONTRACT_VERSION,
            job_is_open,
        )
        .values(
            state=ChunkState.LEASED,
            fence=chunk.c.fence + 1,
            save_seq=0,
            lease_owner=worker_id,
            lease_until_ms=now_ms() + lease_ms,
            first_claim_ms=func.coalesce(chunk.c.first_claim_ms, now_ms()),
        )
        .returning(
            chunk.c.fence,
            chunk.c.job_id,
            chunk.c.rows,
            chunk.c.queue,
            chunk.c.step,
            chunk.c.round,
            chunk.c.parent_id,
        )
    ).one_or_none()
    if taken is None:
        return None
    about = conn.execute(
        select(job.c.name, job.c.budget_nanousd, round_.c.spec)
        .join(round_, round_.c.job_id == job.c.id)
        .where(job.c.id == taken.job_id, round_.c.round == taken.round)
    ).one()
    return Claim(
        chunk_id=chunk_id,
        fence=taken.fence,
        job_id=taken.job_id,
        job_name=about.name,
        rows=Rows.parse(taken.rows),
        queue=taken.queue,
        step=taken.step,
        round=taken.round,
        spec=about.spec,
        budgeted=about.budget_nanousd is not None,
        fresh=taken.fence == 1 and taken.parent_id is None and taken.round == 1,
    )


def heartbeat(conn: Connection, leases: Mapping[int, int], *, lease_ms: int) -> set[int]:
    """Extends the leases of an owner's chunks (id to fence); answers the ids that it no longer owns. Idempotent."""
    lost = set()
    for chunk_id, fence in sorted(leases.items()):
        kept = conn.execute(
            update(chunk)
            .where(chunk.c.id == chunk_id, chunk.c.fence == fence, chunk.c.state == ChunkState.LEASED)
            .values(lease_until_ms=now_ms() + lease_ms)
        )
        if kept.rowcount == 0:
            lost.add(chunk_id)
    return lost


def release(conn: Connection, claim: Claim, children: Sequence[Child] = ()) -> bool:
    """Ends an attempt: the chunk is `done` and its unfinished rows live on in child chunks.

    Fenced. Idempotent: when the same attempt already ended (a commit whose answer was lost) nothing changes. Answers
    whether the attempt has ended by its own hand. Calls it left open are `unknown` from then on. Children of a cancelled
    job are born cancelled.
    """
    closed = conn.execute(
        update(chunk)
        .where(chunk.c.id == claim.chunk_id, chunk.c.fence == claim.fence, chunk.c.state == ChunkState.LEASED)
        .values(state=ChunkState.DONE, done_fence=claim.fence, lease_owner=None, lease_until_ms=None)
    )
    if closed.rowcount == 0:
        done = conn.execute(select(chunk.c.done_fence).where(chunk.c.id == claim.chunk_id)).scalar_one_or_none()
        return done == claim.fence
    ledger.orphan(conn, claim.chunk_id, claim.fence, kind="released")
    if children:
        derive(conn, claim, children, cancelled=is_cancelled(conn, claim.job_id))
    return True


def is_cancelled(conn: Connection, job_id: int) -> bool:
    """Locks the job's row: a cancel that comes now waits, and then finds the children that are born meanwhile."""
    state = select(job.c.state).where(job.c.id == job_id).with_for_update(read=True)
    return conn.execute(state).scalar_one_or_none() == JobState.CANCELLED


def derive(
    conn: Connection, claim: Claim, children: Sequence[Child], *, cancelled: bool = False, crash_count: int = 0
) -> None:
    """Inserts child chunks; unique on (parent, fence, step, queue, not_before, first row), so a repeat adds nothing."""
    insert_ = insert_for(conn.dialect.name)
    parent = conn.execute(select(chunk.c.priority, chunk.c.contract).where(chunk.c.id == claim.chunk_id)).one()
    now: int = conn.execute(select(now_ms())).scalar_one()
    for child in children:
        conn.execute(
            insert_(chunk)
            .values(
                job_id=claim.job_id,
                parent_id=claim.chunk_id,
                parent_fence=claim.fence,
                rows=str(child.rows),
                first_row=child.rows.first,
                n_rows=len(child.rows),
                queue=child.queue,
                step=child.step,
                round=claim.round,
                contract=parent.contract,
                priority=parent.priority,
                state=ChunkState.CANCELLED if cancelled else ChunkState.READY,
                not_before_ms=now + child.wait_ms if child.wait_ms else 0,
                crash_count=crash_count,
                last_error=child.error,
                created_ms=now,
            )
            .on_conflict_do_nothing()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCounts:
    """How a job's chunks stand, and what keeps the ready ones waiting."""

    by_state: Mapping[str, int]
    next_due_ms: int | None  # the earliest not_before of a ready chunk that is not due yet
    queues: Sequence[str]


def counts(conn: Connection, job_id: int) -> ChunkCounts:
    grouped = conn.execute(select(chunk.c.state, func.count()).where(chunk.c.job_id == job_id).group_by(chunk.c.state))
    by_state = {str(state): int(count) for state, count in grouped}
    waiting = conn.execute(
        select(func.min(chunk.c.not_before_ms)).where(
            chunk.c.job_id == job_id, _READY, chunk.c.not_before_ms > now_ms()
        )
    ).scalar_one()
    queues: set[str] = set()
    for state in (_READY, _LEASED):
        queues.update(conn.execute(select(chunk.c.queue).where(chunk.c.job_id == job_id, state).distinct()).scalars())
    return ChunkCounts(by_state=by_state, next_due_ms=waiting, queues=sorted(queues))


def unattended(chunk_id: int, fence: int, about: Any, rows: Rows) -> Claim:
    """A chunk that nobody runs, as the parent of the children that the dispatcher derives from it."""
    return Claim(
        chunk_id=chunk_id,
        fence=fence,
        job_id=about.job_id,
        job_name="",
        rows=rows,
        queue=about.queue,
        step=about.step,
        round=about.round,
        spec="",
        budgeted=False,
        fresh=False,
    )
