"""Booking calls in the ledger before they are sent, as many as the job's budget has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, bindparam, literal_column, select

from batchmill_core.job import ChunkState, JobState, Rows

from .bulk import Bulk, insert_for
from .ledger import LOCK_BUDGET, hold, lines_of
from .schema import call, chunk, job
from .session import now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCall:
    """A call about to be sent. ``bound_nanousd`` is the most it can cost, None without a price."""

    chunk_id: int
    fence: int
    seq: int
    job_id: int
    round: int
    rows: Rows
    model: str
    worker: str
    account: str | None = None
    bound_nanousd: int | None = None
    price_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why calls were not reserved: ``lost`` (not our chunk any more), ``stopped`` (job not open) or ``budget``."""

    reason: str
    job_state: JobState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The first ``accepted`` calls may be sent; ``refusal`` says why the others may not."""

    accepted: int
    refusal: Refusal | None = field(default=None)


_LOCK_ATTEMPT = (
    select(chunk.c.state, chunk.c.fence, job.c.state.label("job_state"), job.c.budget_nanousd)
    .join(job, job.c.id == chunk.c.job_id)
    .where(chunk.c.id == bindparam("chunk"))
    .with_for_update(of=chunk)
)


def reserve(conn: Connection, calls: Sequence[NewCall], *, budgeted: bool) -> Reservation:
    """Books calls of one attempt before they are sent, as many from the front as the budget has room for.

    Refuses when the attempt's lease is lost or the job is not open. Idempotent: a call that is booked already is
    accepted again and held once. The chunk's row is locked meanwhile, so that no reaper passes by a line that is not
    committed yet. A budget that the job was given after ``budgeted`` was read is kept too.
    """
    first = calls[0]
    now = conn.execute(_LOCK_ATTEMPT, {"chunk": first.chunk_id}).one_or_none()
    if now is None or now.state != ChunkState.LEASED or now.fence != first.fence:
        return Reservation(accepted=0, refusal=Refusal(reason="lost"))
    if now.job_state != JobState.OPEN:
        return Reservation(accepted=0, refusal=Refusal(reason="stopped", job_state=JobState(now.job_state)))
    if not budgeted and now.budget_nanousd is None:
        _insert(conn, calls)
        return Reservation(accepted=len(calls))
    return _reserve_within_budget(conn, calls)


def _reserve_within_budget(conn: Connection, calls: Sequence[NewCall]) -> Reservation:
    job_id = calls[0].job_id
    row = conn.execute(LOCK_BUDGET, {"job": job_id}).one()
    booked = set(lines_of(conn, calls[0].chunk_id, calls[0].fence, [c.seq for c in calls]))
    held, fitting = row.held_nanousd, []
    for c in calls:
        need = 0 if c.seq in booked else (c.bound_nanousd or 0)
        if row.budget_nanousd is not None and held + need > row.budget_nanousd:
            break
        held += need
        fitting.append(c)
    if fitting:
        _insert(conn, fitting)
        hold(conn, job_id, held - row.held_nanousd)
    refusal = None if len(fitting) == len(calls) else Refusal(reason="budget")
    return Reservation(accepted=len(fitting), refusal=refusal)


_BOOKED_COLUMNS = (
    "chunk_id",
    "fence",
    "seq",
    "job_id",
    "round",
    "first_row",
    "last_row",
    "rows",
    "account",
    "model",
    "worker",
    "bound_nanousd",
    "price_version",
)


_BOOK = Bulk(
    _BOOKED_COLUMNS,
    lambda dialect: (
        insert_for(dialect)(call)
        .values(state=literal_column("'reserved'"), reserved_ms=now_ms())
        .on_conflict_do_nothing()
    ),
)


def _insert(conn: Connection, calls: Sequence[NewCall]) -> None:
    _BOOK.run(conn, [_booked(c) for c in calls])


def _booked(c: NewCall) -> tuple[Any, ...]:
    many = len(c.rows) > 1
    where = (c.rows.first, c.rows.last, str(c.rows) if many else None)
    return (c.chunk_id, c.fence, c.seq, c.job_id, c.round, *where, c.account, c.model, c.worker, c.bound_nanousd, c.price_version)  # fmt: skip
