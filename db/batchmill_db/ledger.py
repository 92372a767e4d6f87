"""Statements about the ledger: one line per call that was sent, reserved before and settled after.

A line moves from `reserved` to `settled`, `void` or `unknown`, and from `unknown` it may still be settled; each move is
guarded by the state it leaves, so that no repeat counts money twice. A job's ``held_nanousd`` (what counts against its
budget) changes in the same transaction: settled cost, unknown bounds and reserved bounds together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, case, func, literal_column, select, update

from batchmill_core.errors import CallState
from batchmill_core.usage import Usage

from .bulk import Bulk
from .schema import TOKEN_COLUMNS, call, chunk, job
from .session import now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnd:
    """How a call ended: its state, and what is known of its usage and cost."""

    seq: int
    state: CallState
    bound_nanousd: int | None = None
    usage: Usage | None = None
    cost_nanousd: int | None = None
    device_ns: int | None = None
    wasted: bool = False
    error_kind: str | None = None
    http_status: int | None = None
    request_id: str | None = None
    latency_ms: int | None = None


# Budgets are checked one after the other: each transaction takes the job's row until it commits.
LOCK_BUDGET = (
    select(job.c.budget_nanousd, job.c.held_nanousd).where(job.c.id == bindparam("job")).with_for_update(key_share=True)
)


_HOLD = update(job).where(job.c.id == bindparam("b_job")).values(held_nanousd=job.c.held_nanousd + bindparam("b_more"))


def hold(conn: Connection, job_id: int, more_nanousd: int) -> None:
    if more_nanousd:
        conn.execute(_HOLD, {"b_job": job_id, "b_more": more_nanousd})


_LINES = (
    select(call.c.seq, call.c.state, call.c.bound_nanousd)
    .where(
        call.c.chunk_id == bindparam("chunk"),
        call.c.fence == bindparam("fence"),
        call.c.seq.between(bindparam("first"), bindparam("last")),
    )
    .with_for_update(key_share=True)
)


def lines_of(conn: Connection, chunk_id: int, fence: int, seqs: Sequence[int]) -> dict[int, tuple[str, int | None]]:
    """State and bound of these lines of an attempt, as far as they are booked."""
    where = {"chunk": chunk_id, "fence": fence, "first": min(seqs), "last": max(seqs)}
    return {seq: (state, bound) for seq, state, bound in conn.execute(_LINES, where)}


_SETTLED_COLUMNS = (
    "state", *TOKEN_COLUMNS, "cost_nanousd", "device_ns", "wasted", "error_kind", "http_status", "request_id", "latency_ms"
)  # fmt: skip


_STILL_OPEN: tuple[ColumnElement[str], ...] = (literal_column("'reserved'"), literal_column("'unknown'"))
_KEY = ("chunk_id", "fence", "seq")
_SETTLE = Bulk(
    (*(f"b_{c}" for c in _SETTLED_COLUMNS), *(f"b_{c}" for c in _KEY)),
    lambda _: (
        update(call)
        .where(*(call.c[c] == bindparam(f"b_{c}") for c in _KEY), call.c.state.in_(_STILL_OPEN))
        .values(settled_ms=now_ms(), **{c: bindparam(f"b_{c}") for c in _SETTLED_COLUMNS})
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One line that `settle` moved: from which state, to what end, with which bound in the ledger."""

    before: CallState
    end: CallEnd
    bound_nanousd: int | None

    @property
    def freed_nanousd(self) -> int:
        """How much less the line counts against a budget than before. An unknown cost counts as its bound."""
        bound = self.bound_nanousd or 0
        if self.end.state is CallState.VOID:
            return bound
        if self.end.state is CallState.SETTLED and self.end.cost_nanousd is not None:
            return bound - self.end.cost_nanousd
        return 0


def settle(
    conn: Connection, *, chunk_id: int, fence: int, job_id: int, ends: Sequence[CallEnd], budgeted: bool
) -> list[Move]:
    """Closes calls of one attempt; answers the lines that moved. Idempotent: only a `reserved` or `unknown` one does.

    A call that comes back after its attempt was reaped is settled from `unknown` with its real usage.
    """
    if not ends:
        return []
    job_row = conn.execute(LOCK_BUDGET if budgeted else _BUDGET, {"job": job_id}).one_or_none()
    if job_row is not None and not budgeted and job_row.budget_nanousd is not None:  # given since the chunk was claimed
        conn.execute(LOCK_BUDGET, {"job": job_id})
    moves = _moves(lines_of(conn, chunk_id, fence, [e.seq for e in ends]), ends)
    _SETTLE.run(conn, [_settled(chunk_id, fence, m.end) for m in moves])
    if job_row is not None and job_row.budget_nanousd is not None:
        hold(conn, job_id, -sum(m.freed_nanousd for m in moves))
    return moves


_BUDGET = select(job.c.budget_nanousd).where(job.c.id == bindparam("job"))


def _moves(lines: Mapping[int, tuple[str, int | None]], ends: Sequence[CallEnd]) -> list[Move]:
    moves: dict[int, Move] = {}
    for end in ends:
        state, bound = lines.get(end.seq, ("", None))
        repeats = end.seq in moves or (state == "unknown" and end.state is CallState.UNKNOWN)
        if state in ("reserved", "unknown") and not repeats:
            moves[end.seq] = Move(before=CallState(state), end=end, bound_nanousd=bound)
    return list(moves.values())


_NO_USAGE = (None,) * len(TOKEN_COLUMNS)


def _settled(chunk_id: int, fence: int, end: CallEnd) -> tuple[Any, ...]:
    u = end.usage
    used = _NO_USAGE if u is None else (u.input, u.cached_input, u.cache_write, u.output, u.reasoning)
    about = (
        end.cost_nanousd,
        end.device_ns,
        end.wasted,
        end.error_kind,
        end.http_status,
        end.request_id,
        end.latency_ms,
    )
    return (end.state.value, *used, *about, chunk_id, fence, end.seq)


def waste(conn: Connection, chunk_id: int, fence: int, seqs: Iterable[int]) -> int:
    """Marks settled calls of one row each as wasted, since their answer is not used; answers their cost. Idempotent."""
    marked = conn.execute(
        update(call)
        .where(
            call.c.chunk_id == chunk_id,
            call.c.fence == fence,
            call.c.seq.in_(list(seqs)),
            call.c.state == CallState.SETTLED.value,
            call.c.rows.is_(None),
            call.c.wasted.is_(False),
        )
        .values(wasted=True)
        .returning(call.c.cost_nanousd)
    )
    return sum(c or 0 for c in marked.scalars())


_ORPHAN = (
    update(call)
    .where(
        call.c.chunk_id == bindparam("b_chunk"),
        call.c.fence == bindparam("b_fence"),
        call.c.state == literal_column("'reserved'"),
    )
    .values(state=CallState.UNKNOWN.value, error_kind=bindparam("b_kind"), settled_ms=now_ms())
    .returning(call.c.bound_nanousd)
)


def orphan(conn: Connection, chunk_id: int, fence: int, *, kind: str = "worker_lost") -> int:
    """The reserved calls of an attempt that ended become `unknown` with their bounds kept. Idempotent."""
    bounds = list(conn.execute(_ORPHAN, {"b_chunk": chunk_id, "b_fence": fence, "b_kind": kind}).scalars())
    if bounds:
        conn.execute(
            update(chunk)
            .where(chunk.c.id == chunk_id)
            .values(
                unknown_nanousd=chunk.c.unknown_nanousd + sum(b or 0 for b in bounds),
                unknown_calls=chunk.c.unknown_calls + len(bounds),
                calls=chunk.c.calls + len(bounds),
                unsummed_since_ms=func.coalesce(chunk.c.unsummed_since_ms, now_ms()),
            )
        )
    return len(bounds)


def orphan_job(conn: Connection, job_id: int) -> None:
    """The reserved calls of a job that is about to be removed become `unknown`. Idempotent."""
    conn.execute(
        update(call)
        .where(call.c.job_id == job_id, call.c.state == literal_column("'reserved'"))
        .values(state=CallState.UNKNOWN.value, error_kind="job_removed", settled_ms=now_ms())
    )


def held(conn: Connection, job_id: int) -> int:
    """What counts against a job's budget by its ledger: settled cost, and the bounds of what is open. Reads only."""
    counts = case(
        (call.c.state == CallState.VOID.value, 0),
        else_=func.coalesce(call.c.cost_nanousd, call.c.bound_nanousd, 0),
    )
    return int(conn.execute(select(func.coalesce(func.sum(counts), 0)).where(call.c.job_id == job_id)).scalar_one())
