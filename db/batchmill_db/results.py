"""The fenced save: results, ends of calls and counters of one attempt in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, bindparam, func, literal_column, select, update

from batchmill_core.job import ChunkState, Rows
from batchmill_core.request import PAID_STATUSES, RowStatus
from batchmill_core.usage import Usage

from . import ledger
from .bulk import Bulk, insert_for
from .chunks import Child, Claim, release
from .gains import gains_of
from .ledger import CallEnd
from .saved_results import finished
from .schema import COUNTER_COLUMNS, TOKEN_COLUMNS, chunk, job, result
from .session import now_ms
from .spans import among


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


_OWN = (
    update(chunk)
    .where(
        chunk.c.id == bindparam("b_chunk"),
        chunk.c.fence == bindparam("b_fence"),
        chunk.c.state == literal_column("'leased'"),
        chunk.c.save_seq < bindparam("b_seq"),
    )
    .values(save_seq=bindparam("b_seq"), last_save_ms=now_ms())
)


def save(conn: Connection, work: Save) -> Saved:
    """Writes results, settles calls and adds to the chunk's counters, if the attempt still owns its chunk.

    One transaction with the caller's. Fenced by (chunk, fence). Idempotent by ``seq``: a save that already happened (a
    commit whose answer was lost) changes nothing. Within a round the first final result of a row stays. An attempt that
    lost its chunk only settles its calls and inserts paid answers where nothing is, while its round is the job's; the
    rest is booked as wasted.
    """
    claim = work.claim
    owned = conn.execute(_OWN, {"b_chunk": claim.chunk_id, "b_fence": claim.fence, "b_seq": work.seq})
    if owned.rowcount == 0:
        return _save_unowned(conn, work)
    accepted = _upsert(conn, claim, work.results)
    _book(conn, work, accepted)
    if work.releases:
        release(conn, claim, work.children)
    return Saved(live=True, accepted=len(accepted))


def _save_unowned(conn: Connection, work: Save) -> Saved:
    claim = work.claim
    now = conn.execute(
        select(chunk.c.fence, chunk.c.state, chunk.c.save_seq, chunk.c.done_fence)
        .where(chunk.c.id == claim.chunk_id)
        .with_for_update()
    ).one_or_none()
    if now is not None and now.save_seq >= work.seq and claim.fence in (now.done_fence, now.fence):
        return Saved(live=True, accepted=len(work.results))  # it happened before
    accepted: set[int] = set()
    if _may_fill(conn, claim):
        accepted = _fill(conn, claim, [r for r in work.results if r.status in PAID_STATUSES])
        _revive(conn, claim.job_id, accepted)
    _book(conn, work, accepted)
    return Saved(live=False, accepted=len(accepted))


def _may_fill(conn: Connection, claim: Claim) -> bool:
    """Whether the job is still in the attempt's round. Locks the job, so that no next round opens meanwhile."""
    number = conn.execute(select(job.c.round).where(job.c.id == claim.job_id).with_for_update(key_share=True))
    return number.scalar_one_or_none() == claim.round


def _revive(conn: Connection, job_id: int, rows: set[int]) -> None:
    """Rows that were given up as dead have an answer after all: their chunks are `done`."""
    for piece in among(chunk.c.first_row, Rows.of(rows)):
        conn.execute(
            update(chunk)
            .where(chunk.c.job_id == job_id, chunk.c.state == ChunkState.DEAD, piece)
            .values(
                state=ChunkState.DONE, n_dead=0, unsummed_since_ms=func.coalesce(chunk.c.unsummed_since_ms, now_ms())
            )
        )


_COUNT = Bulk(
    (*(f"b_{c}" for c in COUNTER_COLUMNS), "b_chunk"),
    lambda _: (
        update(chunk)
        .where(chunk.c.id == bindparam("b_chunk"))
        .values(
            unsummed_since_ms=func.coalesce(chunk.c.unsummed_since_ms, now_ms()),
            **{c: chunk.c[c] + bindparam(f"b_{c}") for c in COUNTER_COLUMNS},
        )
    ),
)


def _book(conn: Connection, work: Save, accepted: set[int]) -> None:
    """Settles the calls, those of results that were not taken as wasted, and adds all to the chunk's counters."""
    claim = work.claim
    unused = {s for r in work.results if r.row not in accepted for s in r.seqs}
    unused -= {s for r in work.results if r.row in accepted for s in r.seqs}
    ends = [replace(e, wasted=True) if e.seq in unused else e for e in work.ends] if unused else work.ends
    moves = ledger.settle(
        conn, chunk_id=claim.chunk_id, fence=claim.fence, job_id=claim.job_id, ends=ends, budgeted=claim.budgeted
    )
    gains = gains_of({r.row: r for r in reversed(work.results) if r.row in accepted}.values(), moves)
    if before := unused - {e.seq for e in ends}:
        gains["wasted_nanousd"] += ledger.waste(conn, claim.chunk_id, claim.fence, before)
    if any(gains.values()):
        _COUNT.run(conn, [(*gains.values(), claim.chunk_id)])


_RESULT_COLUMNS = tuple(c.name for c in result.c if c.name != "saved_ms")


def _put(dialect: str) -> Any:
    statement = insert_for(dialect)(result).values(saved_ms=now_ms())
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=[result.c.job_id, result.c.row],
        set_={c.name: new[c.name] for c in result.c if c.name not in ("job_id", "row")},
        where=result.c.round < new.round,
    )


_PUT = Bulk(_RESULT_COLUMNS, _put)
_FILL = Bulk(
    _RESULT_COLUMNS, lambda dialect: insert_for(dialect)(result).values(saved_ms=now_ms()).on_conflict_do_nothing()
)


def _upsert(conn: Connection, claim: Claim, results: Sequence[NewResult]) -> set[int]:
    """Saves results of rows that have none of this round yet; answers these rows."""
    if not results:
        return set()
    return _write(conn, _PUT, claim, results, finished(conn, claim.job_id, _rows(results), claim.round))


def _fill(conn: Connection, claim: Claim, results: Sequence[NewResult]) -> set[int]:
    """Saves results of rows that have none of any round; answers these rows."""
    if not results:
        return set()
    return _write(conn, _FILL, claim, results, finished(conn, claim.job_id, _rows(results), 0))


def _rows(results: Sequence[NewResult]) -> Rows:
    return Rows.of(r.row for r in results)


def _write(conn: Connection, put: Bulk, claim: Claim, results: Sequence[NewResult], taken: set[int]) -> set[int]:
    new = {r.row: r for r in reversed(results) if r.row not in taken}
    changed = put.run(conn, [_values(claim, new[row]) for row in sorted(new)])
    if changed == len(new):
        return set(new)
    own = (result.c.job_id == claim.job_id, result.c.chunk_id == claim.chunk_id, result.c.fence == claim.fence)
    mine: set[int] = set()  # another attempt came first between the look and the write
    for piece in among(result.c.row, Rows.of(new)):
        mine.update(conn.execute(select(result.c.row).where(*own, piece)).scalars())
    return mine


def _values(claim: Claim, r: NewResult) -> tuple[Any, ...]:
    """The values of `_RESULT_COLUMNS`."""
    u = r.usage
    used = _NO_USAGE if u is None else (u.input, u.cached_input, u.cache_write, u.output, u.reasoning)
    return (
        claim.job_id,
        r.row,
        claim.round,
        r.status.value,
        r.output,
        r.embedding,
        r.finish_reason,
        r.error_kind,
        r.error,
        r.raw,
        r.model,
        r.account,
        *used,
        r.cost_nanousd,
        r.unknown_nanousd,
        r.calls,
        r.cached,
        r.sanitized,
        r.latency_ms,
        r.ttft_ms,
        claim.chunk_id,
        claim.fence,
    )


_NO_USAGE = (None,) * len(TOKEN_COLUMNS)
