"""Statements about the ledger: one line per call that was sent, reserved before and settled after.

A line moves from `reserved` to `settled`, `void` or `unknown`, and from `unknown` it may still be settled; each move is
guarded by the state it leaves, so that no repeat counts money twice. A job's ``held_nanousd`` (what counts against its
budget) changes in the same transaction: settled cost, unknown bounds and reserved bounds together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, bindparam, case, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from batchmill_core.errors import CallState
from batchmill_core.job import ChunkState, JobState, Rows
from batchmill_core.usage import Usage

from .schema import TOKEN_COLUMNS, call, chunk, job
from .session import now_ms

_OPEN = (CallState.RESERVED.value, CallState.UNKNOWN.value)


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


def reserve(conn: Connection, calls: Sequence[NewCall], *, budgeted: bool) -> Reservation:
    """Books calls of one attempt before they are sent, as many from the front as the budget has room for.

    Refuses when the attempt's lease is lost or the job is not open. Idempotent: a call that is booked already is
    accepted again and held once.
    """
    first = calls[0]
    lock = select(chunk.c.state, chunk.c.fence, job.c.state.label("job_state")).join(job, job.c.id == chunk.c.job_id)
    now = conn.execute(lock.where(chunk.c.id == first.chunk_id)).one_or_none()
    if now is None or now.state != ChunkState.LEASED or now.fence != first.fence:
        return Reservation(accepted=0, refusal=Refusal(reason="lost"))
    if now.job_state != JobState.OPEN:
        return Reservation(accepted=0, refusal=Refusal(reason="stopped", job_state=JobState(now.job_state)))
    if not budgeted:
        _insert(conn, calls)
        return Reservation(accepted=len(calls))
    return _reserve_within_budget(conn, calls)


def _reserve_within_budget(conn: Connection, calls: Sequence[NewCall]) -> Reservation:
    job_id = calls[0].job_id
    # Takes the job's row for this transaction, so that budgets are checked one after the other.
    conn.execute(update(job).where(job.c.id == job_id).values(held_nanousd=job.c.held_nanousd))
    row = conn.execute(select(job.c.budget_nanousd, job.c.held_nanousd).where(job.c.id == job_id)).one()
    first = calls[0]
    booked = set(
        conn.execute(
            select(call.c.seq).where(
                call.c.chunk_id == first.chunk_id, call.c.fence == first.fence, call.c.seq.in_([c.seq for c in calls])
            )
        ).scalars()
    )
    held, fitting = row.held_nanousd, []
    for c in calls:
        need = 0 if c.seq in booked else (c.bound_nanousd or 0)
        if row.budget_nanousd is not None and held + need > row.budget_nanousd:
            break
        held += need
        fitting.append(c)
    if fitting:
        _insert(conn, fitting)
        conn.execute(update(job).where(job.c.id == job_id).values(held_nanousd=held))
    refusal = None if len(fitting) == len(calls) else Refusal(reason="budget")
    return Reservation(accepted=len(fitting), refusal=refusal)


def _insert(conn: Connection, calls: Sequence[NewCall]) -> None:
    insert_ = sqlite.insert if conn.dialect.name == "sqlite" else postgresql.insert
    statement = insert_(call).values(state=CallState.RESERVED.value, reserved_ms=now_ms()).on_conflict_do_nothing()
    conn.execute(
        statement,
        [
            {
                "chunk_id": c.chunk_id,
                "fence": c.fence,
                "seq": c.seq,
                "job_id": c.job_id,
                "round": c.round,
                "first_row": c.rows.first,
                "last_row": c.rows.last,
                "rows": str(c.rows) if len(c.rows) > 1 else None,
                "account": c.account,
                "model": c.model,
                "worker": c.worker,
                "bound_nanousd": c.bound_nanousd,
                "price_version": c.price_version,
            }
            for c in calls
        ],
    )


_SETTLE = (
    update(call)
    .where(
        call.c.chunk_id == bindparam("b_chunk"),
        call.c.fence == bindparam("b_fence"),
        call.c.seq == bindparam("b_seq"),
        call.c.state.in_(_OPEN),
    )
    .values(
        state=bindparam("b_state"),
        **{c: bindparam(f"b_{c}") for c in TOKEN_COLUMNS},
        cost_nanousd=bindparam("b_cost"),
        device_ns=bindparam("b_device"),
        wasted=bindparam("b_wasted"),
        error_kind=bindparam("b_kind"),
        http_status=bindparam("b_http"),
        request_id=bindparam("b_request"),
        latency_ms=bindparam("b_latency"),
        settled_ms=now_ms(),
    )
)


def settle(
    conn: Connection, *, chunk_id: int, fence: int, job_id: int, ends: Sequence[CallEnd], budgeted: bool
) -> None:
    """Closes calls of one attempt. Idempotent: only a line that is `reserved` or `unknown` moves.

    A call that comes back after its attempt was reaped is settled from `unknown` with its real usage.
    """
    if not ends:
        return
    if not budgeted:
        conn.execute(_SETTLE, [_settle_values(chunk_id, fence, e) for e in ends])
        return
    conn.execute(update(job).where(job.c.id == job_id).values(held_nanousd=job.c.held_nanousd))
    freed = 0
    for end in ends:
        moved = conn.execute(_SETTLE, _settle_values(chunk_id, fence, end))
        if moved.rowcount == 1 and end.state is not CallState.UNKNOWN:
            freed += (end.bound_nanousd or 0) - (end.cost_nanousd or 0)
    if freed:
        conn.execute(update(job).where(job.c.id == job_id).values(held_nanousd=job.c.held_nanousd - freed))


def _settle_values(chunk_id: int, fence: int, end: CallEnd) -> dict[str, Any]:
    u = end.usage
    return {
        "b_chunk": chunk_id,
        "b_fence": fence,
        "b_seq": end.seq,
        "b_state": end.state.value,
        "b_input_tokens": None if u is None else u.input,
        "b_cached_input_tokens": None if u is None else u.cached_input,
        "b_cache_write_tokens": None if u is None else u.cache_write,
        "b_output_tokens": None if u is None else u.output,
        "b_reasoning_tokens": None if u is None else u.reasoning,
        "b_cost": end.cost_nanousd,
        "b_device": end.device_ns,
        "b_wasted": end.wasted,
        "b_kind": end.error_kind,
        "b_http": end.http_status,
        "b_request": end.request_id,
        "b_latency": end.latency_ms,
    }


def orphan(conn: Connection, chunk_id: int, fence: int) -> int:
    """The reserved calls of a dead attempt become `unknown` with their bounds kept. Idempotent."""
    lost = conn.execute(
        update(call)
        .where(call.c.chunk_id == chunk_id, call.c.fence == fence, call.c.state == CallState.RESERVED.value)
        .values(state=CallState.UNKNOWN.value, error_kind="worker_lost", settled_ms=now_ms())
        .returning(call.c.bound_nanousd)
    ).scalars()
    bounds = list(lost)
    if bounds:
        conn.execute(
            update(chunk)
            .where(chunk.c.id == chunk_id)
            .values(
                unknown_nanousd=chunk.c.unknown_nanousd + sum(b or 0 for b in bounds),
                unknown_calls=chunk.c.unknown_calls + len(bounds),
                calls=chunk.c.calls + len(bounds),
            )
        )
    return len(bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a row's earlier calls of this round amount to."""

    tries: int = 0
    calls: int = 0
    cost_nanousd: int | None = None
    unknown_nanousd: int | None = None
    usage: Usage | None = None


def past_of(conn: Connection, job_id: int, rows: Rows, round_number: int) -> dict[int, Past]:
    """Earlier calls per row of this round that were not void: a drain or a crash resets no tries. Reads only.

    A call over many rows counts as a try for each; its cost is split evenly, the first rows taking the remainder.
    """
    found = conn.execute(
        select(call).where(
            call.c.job_id == job_id,
            call.c.round == round_number,
            call.c.state.in_((CallState.SETTLED.value, CallState.UNKNOWN.value)),
            call.c.first_row <= rows.last,
            call.c.last_row >= rows.first,
        )
    )
    past: dict[int, Past] = {}
    wanted = set(rows)
    for c in found:
        covered = list(Rows.parse(c.rows)) if c.rows else [c.first_row]
        _add_past(past, c, covered, wanted)
    return past


def _add_past(past: dict[int, Past], c: Any, covered: Sequence[int], wanted: set[int]) -> None:
    from batchmill_core.usage import split, split_usage

    weights = [1] * len(covered)
    unknown = c.state == CallState.UNKNOWN.value
    amount = c.bound_nanousd if unknown else c.cost_nanousd
    amounts: Sequence[int | None] = [None] * len(covered) if amount is None else split(amount, weights)
    whole = (
        None
        if c.input_tokens is None
        else Usage(**{t.removesuffix("_tokens"): getattr(c, t) or 0 for t in TOKEN_COLUMNS})
    )
    usages: Sequence[Usage | None] = [None] * len(covered) if whole is None else split_usage(whole, weights)
    for row, money, usage in zip(covered, amounts, usages, strict=True):
        if row in wanted:
            p = past.get(row, Past())
            past[row] = Past(
                tries=p.tries + 1,
                calls=p.calls + 1,
                cost_nanousd=_plus(p.cost_nanousd, None if unknown else money),
                unknown_nanousd=_plus(p.unknown_nanousd, money if unknown else None),
                usage=usage if p.usage is None else (p.usage if usage is None else p.usage + usage),
            )


def _plus(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else a + b


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Sums over the ledger. ``unknown_nanousd`` is an upper bound; ``unbounded`` counts calls without even a bound."""

    key: str = ""
    calls: int = 0
    settled_nanousd: int = 0
    unknown_nanousd: int = 0
    wasted_nanousd: int = 0
    reserved_nanousd: int = 0
    unknown_calls: int = 0
    unbounded: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0


_BY = {
    "account": func.coalesce(call.c.account, "local"),
    "model": call.c.model,
    "worker": call.c.worker,
    "job": func.coalesce(job.c.public_id, "removed"),
    "day": None,  # by dialect
}
BY = tuple(_BY)


def spending(conn: Connection, *, by: str | None = None, job_id: int | None = None) -> list[Spending]:
    """Sums of the ledger, grouped by model, job, day (UTC), account or worker. Reads only."""
    key: Any = _BY[by] if by in _BY and by != "day" else None
    if by == "day":
        key = (
            func.date(call.c.reserved_ms / 1000, "unixepoch")
            if conn.dialect.name == "sqlite"
            else func.to_char(func.to_timestamp(call.c.reserved_ms / 1000).op("AT TIME ZONE")("UTC"), "YYYY-MM-DD")
        )

    def total(condition: Any, column: Any) -> Any:
        return func.coalesce(func.sum(case((condition, column), else_=0)), 0)

    settled, unknown = call.c.state == "settled", call.c.state == "unknown"
    columns = [
        func.sum(case((call.c.state != "void", 1), else_=0)).label("calls"),
        total(settled, call.c.cost_nanousd).label("settled_nanousd"),
        total(unknown, call.c.bound_nanousd).label("unknown_nanousd"),
        total(and_(settled, call.c.wasted), call.c.cost_nanousd).label("wasted_nanousd"),
        total(call.c.state == "reserved", call.c.bound_nanousd).label("reserved_nanousd"),
        total(or_(unknown, and_(settled, call.c.cost_nanousd.is_(None))), 1).label("unknown_calls"),
        total(
            or_(and_(unknown, call.c.bound_nanousd.is_(None)), and_(settled, call.c.cost_nanousd.is_(None))), 1
        ).label("unbounded"),
        func.coalesce(func.sum(call.c.input_tokens), 0).label("input_tokens"),
        func.coalesce(func.sum(call.c.cached_input_tokens), 0).label("cached_input_tokens"),
        func.coalesce(func.sum(call.c.output_tokens), 0).label("output_tokens"),
    ]
    query = select(*columns) if key is None else select(key.label("key"), *columns).group_by(key).order_by(key)
    if by == "job":
        query = query.select_from(call.outerjoin(job, job.c.id == call.c.job_id))
    if job_id is not None:
        query = query.where(call.c.job_id == job_id)
    return [_spending(dict(r._mapping)) for r in conn.execute(query)]


def _spending(m: Mapping[Any, Any]) -> Spending:
    key = str(m.get("key", ""))
    return Spending(key=key, **{str(k): int(v or 0) for k, v in m.items() if k != "key"})
