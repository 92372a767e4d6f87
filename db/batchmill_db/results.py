"""Statements about results: the fenced save, and reading them in row order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from batchmill_core.errors import CallState
from batchmill_core.job import ChunkState, Rows
from batchmill_core.request import PAID_STATUSES, RowStatus
from batchmill_core.usage import Usage

from . import ledger
from .chunks import Child, Claim, release
from .ledger import CallEnd
from .schema import COUNTER_COLUMNS, TOKEN_COLUMNS, chunk, result
from .session import now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class NewResult:
    """The final result of one row in one round, with what all its calls of the round came to."""

    row: int
    status: RowStatus
    output: str | None = None
    embedding: bytes | None = None
    finish_reason: str | None = None
    error_kind: str | None = None
    error: str | None = None
    raw: str | None = None
    model: str | None = None
    account: str | None = None
    usage: Usage | None = None
    cost_nanousd: int | None = None
    unknown_nanousd: int | None = None
    calls: int = 0
    cached: bool = False
    sanitized: bool = False
    latency_ms: int | None = None
    ttft_ms: int | None = None
    seqs: tuple[int, ...] = ()  # the calls of this attempt that made it, to mark them wasted if it is not accepted
    replaces: RowStatus | None = None  # the status it had in an earlier round


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Everything that one attempt has to write at this moment. ``seq`` counts the saves of the attempt from 1."""

    claim: Claim
    seq: int
    results: Sequence[NewResult] = ()
    ends: Sequence[CallEnd] = ()
    children: Sequence[Child] = ()
    releases: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What became of a save: ``live`` when the attempt still owned its chunk; ``accepted`` counts results taken."""

    live: bool
    accepted: int


def save(conn: Connection, work: Save) -> Saved:
    """Writes results, settles calls and adds to the chunk's counters, if the attempt still owns its chunk.

    One transaction with the caller's. Fenced by (chunk, fence). Idempotent by ``seq``: a save that already happened (a
    commit whose answer was lost) changes nothing. Within a round the first final result of a row stays. An attempt that
    lost its chunk only settles its calls and inserts paid answers where nothing is; the rest is booked as wasted.
    """
    claim = work.claim
    owned = conn.execute(
        update(chunk)
        .where(
            chunk.c.id == claim.chunk_id,
            chunk.c.fence == claim.fence,
            chunk.c.state == ChunkState.LEASED,
            chunk.c.save_seq < work.seq,
        )
        .values(save_seq=work.seq, last_save_ms=now_ms())
    )
    if owned.rowcount == 0:
        return _save_unowned(conn, work)
    accepted = _upsert(conn, claim, work.results, replace=True)
    _book(conn, work, accepted)
    if work.releases:
        release(conn, claim, work.children)
    return Saved(live=True, accepted=len(accepted))


def _save_unowned(conn: Connection, work: Save) -> Saved:
    claim = work.claim
    now = conn.execute(
        select(chunk.c.fence, chunk.c.state, chunk.c.save_seq, chunk.c.done_fence).where(chunk.c.id == claim.chunk_id)
    ).one_or_none()
    if now is not None and now.save_seq >= work.seq and (now.done_fence == claim.fence or now.fence == claim.fence):
        return Saved(live=True, accepted=len(work.results))  # it happened before
    paid = [r for r in work.results if r.status in PAID_STATUSES]
    accepted = _upsert(conn, claim, paid, replace=False)
    _book(conn, work, accepted, live=False)
    return Saved(live=False, accepted=len(accepted))


def _book(conn: Connection, work: Save, accepted: set[int], *, live: bool = True) -> None:
    """Settles the calls, those of results that were not taken as wasted, and adds all to the chunk's counters."""
    claim = work.claim
    unused = {s for r in work.results if r.row not in accepted for s in r.seqs}
    used = {s for r in work.results if r.row in accepted for s in r.seqs}
    wasted = unused - used
    ends = [_as_wasted(e) if e.seq in wasted else e for e in work.ends]
    ledger.settle(
        conn, chunk_id=claim.chunk_id, fence=claim.fence, job_id=claim.job_id, ends=ends, budgeted=claim.budgeted
    )
    gains = _gains([r for r in work.results if r.row in accepted], ends)
    if not live:  # its calls were counted as unknown when it was reaped
        known = [e for e in ends if e.state is not CallState.UNKNOWN]
        gains["unknown_nanousd"] = gains.get("unknown_nanousd", 0) - sum(e.bound_nanousd or 0 for e in known)
        gains["unknown_calls"] = gains.get("unknown_calls", 0) - len(known)
        gains["calls"] = 0
    changes = {c: getattr(chunk.c, c) + n for c, n in gains.items() if n}
    if changes:
        conn.execute(update(chunk).where(chunk.c.id == claim.chunk_id).values(**changes))


def _as_wasted(end: CallEnd) -> CallEnd:
    from dataclasses import replace

    return replace(end, wasted=True)


def _gains(results: Sequence[NewResult], ends: Sequence[CallEnd]) -> dict[str, int]:
    gains = dict.fromkeys(COUNTER_COLUMNS, 0)
    for r in results:
        gains[f"n_{r.status.value}"] += 1
        if r.replaces is not None:
            gains[f"n_{r.replaces.value}"] -= 1
    for e in ends:
        if e.state is CallState.VOID:
            continue
        gains["calls"] += 1
        if e.state is CallState.UNKNOWN:
            gains["unknown_calls"] += 1
            gains["unknown_nanousd"] += e.bound_nanousd or 0
            continue
        if e.cost_nanousd is None:
            gains["unknown_calls"] += 1
        gains["cost_nanousd"] += e.cost_nanousd or 0
        if e.wasted:
            gains["wasted_nanousd"] += e.cost_nanousd or 0
        if e.usage is not None:
            for c in TOKEN_COLUMNS:
                gains[c] += getattr(e.usage, c.removesuffix("_tokens"))
    return gains


def _upsert(conn: Connection, claim: Claim, results: Sequence[NewResult], *, replace: bool) -> set[int]:
    if not results:
        return set()
    insert_ = sqlite.insert if conn.dialect.name == "sqlite" else postgresql.insert
    statement = insert_(result)
    if replace:
        new = statement.excluded
        changed = {c.name: new[c.name] for c in result.c if c.name not in ("job_id", "row")}
        statement = statement.on_conflict_do_update(
            index_elements=[result.c.job_id, result.c.row], set_=changed, where=result.c.round < new.round
        )
    else:
        statement = statement.on_conflict_do_nothing()
    saved_ms: int = conn.execute(select(now_ms())).scalar_one()
    values = [_values(claim, r, saved_ms) for r in sorted(results, key=lambda r: r.row)]
    return set(conn.execute(statement.returning(result.c.row), values).scalars())


def _values(claim: Claim, r: NewResult, saved_ms: int) -> dict[str, Any]:
    u = r.usage
    return {
        "job_id": claim.job_id,
        "row": r.row,
        "round": claim.round,
        "status": r.status.value,
        "output": r.output,
        "embedding": r.embedding,
        "finish_reason": r.finish_reason,
        "error_kind": r.error_kind,
        "error": r.error,
        "raw": r.raw,
        "model": r.model,
        "account": r.account,
        "input_tokens": None if u is None else u.input,
        "cached_input_tokens": None if u is None else u.cached_input,
        "cache_write_tokens": None if u is None else u.cache_write,
        "output_tokens": None if u is None else u.output,
        "reasoning_tokens": None if u is None else u.reasoning,
        "cost_nanousd": r.cost_nanousd,
        "unknown_nanousd": r.unknown_nanousd,
        "calls": r.calls,
        "cached": r.cached,
        "sanitized": r.sanitized,
        "latency_ms": r.latency_ms,
        "ttft_ms": r.ttft_ms,
        "chunk_id": claim.chunk_id,
        "fence": claim.fence,
        "saved_ms": saved_ms,
    }


def finished(conn: Connection, job_id: int, rows: Rows, round_number: int) -> set[int]:
    """The rows that have a final result of this round or a later one. Reads only."""
    found = conn.execute(
        select(result.c.row).where(
            result.c.job_id == job_id, result.c.row.between(rows.first, rows.last), result.c.round >= round_number
        )
    ).scalars()
    return {n for n in found if n in rows}


def earlier(conn: Connection, job_id: int, rows: Rows, round_number: int) -> dict[int, RowStatus]:
    """The statuses that rows have from earlier rounds. Reads only."""
    found = conn.execute(
        select(result.c.row, result.c.status).where(
            result.c.job_id == job_id, result.c.row.between(rows.first, rows.last), result.c.round < round_number
        )
    )
    return {r.row: RowStatus(r.status) for r in found}


EXPORT_COLUMNS = tuple(c for c in result.c if c.name not in ("job_id", "chunk_id", "fence"))


def between(conn: Connection, job_id: int, first_row: int, last_row: int) -> Sequence[Any]:
    """Results of a span of rows in row order, as named tuples of `EXPORT_COLUMNS`. Reads only."""
    return conn.execute(
        select(*EXPORT_COLUMNS)
        .where(result.c.job_id == job_id, result.c.row.between(first_row, last_row))
        .order_by(result.c.row)
    ).all()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSample:
    """How many rows ended with one kind of error, and one of them."""

    kind: str
    count: int
    row: int
    message: str


def errors_by_kind(conn: Connection, job_id: int) -> list[ErrorSample]:
    """Errors by kind with an example each, the most frequent first. Reads only."""
    bad = [s.value for s in RowStatus if s is not RowStatus.OK and s is not RowStatus.TRUNCATED]
    groups = conn.execute(
        select(result.c.error_kind, func.count().label("n"), func.min(result.c.row).label("row"))
        .where(result.c.job_id == job_id, result.c.status.in_(bad), result.c.error_kind.is_not(None))
        .group_by(result.c.error_kind)
        .order_by(func.count().desc())
    ).all()
    samples = []
    for g in groups:
        message = conn.execute(
            select(result.c.error).where(result.c.job_id == job_id, result.c.row == g.row)
        ).scalar_one()
        samples.append(ErrorSample(kind=g.error_kind, count=g.n, row=g.row, message=message or ""))
    return samples
