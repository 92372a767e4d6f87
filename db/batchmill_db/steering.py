"""Statements that move a job between open, paused, cancelled and done, and what its budget allows."""

from __future__ import annotations

from sqlalchemy import (
    Connection,
    exists,
    func,
    literal_column,
    select,
    update,
)

from batchmill_core.errors import JobError
from batchmill_core.job import (
    ChunkState,
    JobState,
    check_transition,
    sources_of,
)
from batchmill_core.usage import usd

from . import ledger
from .counters import sum_counters
from .jobs import get
from .schema import call, chunk, job
from .session import now_ms

_READY = chunk.c.state == literal_column("'ready'")  # in a literal, so that the partial indexes serve


def pause(conn: Connection, job_id: int, *, kind: str, reason: str, account: str | None = None) -> bool:
    """`open` to `paused` with its reason. Idempotent: answers whether this call did it; the first reason stays."""
    done = conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state.in_(sources_of(JobState.PAUSED)))
        .values(state=JobState.PAUSED, reason_kind=kind, reason=reason, reason_account=account)
    )
    return done.rowcount == 1


def resume(conn: Connection, job_id: int, *, budget_nanousd: int | None = None) -> JobState:
    """`paused` to `open`, its ready chunks publishable at once; may set the budget. Idempotent on an open job.

    Answers the state the job had. Raises JobError for a job that has ended or is still loading.
    """
    now = get(conn, job_id)
    if now.state is not JobState.OPEN:
        if now.state is not JobState.PAUSED:
            check_transition(now.public_id, now.state, JobState.OPEN)
            raise JobError(
                f"job {now.public_id} is {now.state}; there is nothing to resume (`batchmill retry` starts a new round)"
            )
        conn.execute(
            update(job)
            .where(job.c.id == job_id, job.c.state == JobState.PAUSED)
            .values(state=JobState.OPEN, reason=None, reason_kind=None, reason_account=None)
        )
    if budget_nanousd is not None:
        set_budget(conn, job_id, budget_nanousd)
    make_publishable(conn, job_id)
    return now.state


def set_budget(conn: Connection, job_id: int, budget_nanousd: int) -> None:
    """A job that had no budget was not charged call by call, so what it holds is added up from its ledger."""
    conn.execute(update(job).where(job.c.id == job_id).values(budget_nanousd=budget_nanousd))  # and locks the row
    conn.execute(update(job).where(job.c.id == job_id).values(held_nanousd=ledger.held(conn, job_id)))


def make_publishable(conn: Connection, job_id: int) -> None:
    """Forgets that ready chunks were published, so that the next tick does it again. Idempotent."""
    conn.execute(
        update(chunk)
        .where(chunk.c.job_id == job_id, _READY, chunk.c.published_ms.is_not(None))
        .values(published_ms=None)
    )


def resume_healed(conn: Connection, account: str) -> list[int]:
    """Opens the jobs that were paused because this account was stopped, publishable at once. Idempotent."""
    healed = list(
        conn.execute(
            update(job)
            .where(job.c.state == JobState.PAUSED, job.c.reason_kind == "account", job.c.reason_account == account)
            .values(state=JobState.OPEN, reason=None, reason_kind=None, reason_account=None)
            .returning(job.c.id)
        ).scalars()
    )
    for job_id in healed:
        make_publishable(conn, job_id)
    return healed


def cancel(conn: Connection, job_id: int) -> JobState:
    """Ends a job: its ready chunks are cancelled at once, leased ones by their workers. Idempotent.

    Answers the state the job had. Raises JobError for a job that is done or failed.
    """
    now = get(conn, job_id)
    if now.state is JobState.CANCELLED:
        return now.state
    check_transition(now.public_id, now.state, JobState.CANCELLED)
    conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state.in_(sources_of(JobState.CANCELLED)))
        .values(state=JobState.CANCELLED, finished_ms=now_ms(), reason_kind="user", reason="cancelled by the user")
    )
    conn.execute(
        update(chunk)
        .where(chunk.c.job_id == job_id, chunk.c.state == ChunkState.READY)
        .values(state=ChunkState.CANCELLED)
    )
    return now.state


def finish(conn: Connection) -> list[int]:
    """`open` to `done` for loaded jobs with no chunk ready or leased. Idempotent; answers the jobs it closed."""
    working = exists().where(chunk.c.job_id == job.c.id, chunk.c.state.in_((ChunkState.READY, ChunkState.LEASED)))
    closed = list(
        conn.execute(
            update(job)
            .where(job.c.state == JobState.OPEN, job.c.loaded.is_(True), ~working)
            .values(state=JobState.DONE, finished_ms=now_ms(), reason=None, reason_kind=None)
            .returning(job.c.id)
        ).scalars()
    )
    if closed:
        sum_counters(conn, closed)
    return closed


def reserved_calls(conn: Connection, job_id: int) -> int:
    """How many calls of this job are in flight (or were, in a worker not yet found dead)."""
    reserved = call.c.state == literal_column("'reserved'")
    return conn.execute(select(func.count()).where(call.c.job_id == job_id, reserved)).scalar_one()


def pause_if_spent(conn: Connection, job_id: int, need_nanousd: int) -> bool:
    """Pauses a job for its budget when nothing is in flight and ``need_nanousd`` more does not fit. Idempotent."""
    # Locked, so that nothing is settled between the look at what is held and the look at what is in flight.
    lock = select(job.c.budget_nanousd, job.c.held_nanousd).where(job.c.id == job_id).with_for_update(key_share=True)
    row = conn.execute(lock).one()
    if row.budget_nanousd is None or row.held_nanousd + need_nanousd <= row.budget_nanousd:
        return False
    if reserved_calls(conn, job_id):
        return False
    reason = f"budget of ${usd(row.budget_nanousd)} is used up: ${usd(row.held_nanousd)} spent or unknown, the next call may cost ${usd(need_nanousd)}"
    return pause(conn, job_id, kind="budget", reason=reason)
