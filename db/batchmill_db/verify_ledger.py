"""Invariants of money and counts: counters say what results and the ledger say, a budget is kept."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, bindparam, case, func, literal_column, or_, select

from batchmill_core.errors import CallState
from batchmill_core.job import ChunkState, Rows
from batchmill_core.request import STATUSES, RowStatus

from . import ledger
from .jobs import JobRecord
from .reaping import dead_rows
from .saved_results import finished
from .schema import COUNTER_COLUMNS, STATUS_COLUMNS, TOKEN_COLUMNS, call, chunk, result
from .schema import job as job_table
from .verify_rows import MOST_CASES, cases

_SETTLED = call.c.state == CallState.SETTLED
_UNKNOWN = call.c.state == CallState.UNKNOWN


def counters_are_the_results(conn: Connection, job: JobRecord) -> list[str]:
    """The chunks' counters by status sum up to the rows that have this status."""
    sums = conn.execute(
        select(*(func.coalesce(func.sum(chunk.c[c]), 0) for c in STATUS_COLUMNS)).where(chunk.c.job_id == job.id)
    ).one()
    grouped = select(result.c.status, func.count()).where(result.c.job_id == job.id).group_by(result.c.status)
    actual = {str(status): int(n) for status, n in conn.execute(grouped)}
    dead = Rows.of(dead_rows(conn, job.id))
    actual[RowStatus.DEAD] = len(dead) - len(finished(conn, job.id, dead, 0))
    wrong = [(s.value, int(n), actual.get(s.value, 0)) for s, n in zip(STATUSES, sums, strict=True)]
    return [f"status={s} counted={n} actual={m}" for s, n, m in wrong if n != m]


def the_job_counts_what_its_chunks_count(conn: Connection, job: JobRecord) -> list[str]:
    """The job's counters are the sums of its chunks', once these are all summed."""
    sums = conn.execute(_SUMS, {"job": job.id}).one()
    if sums.unsummed:
        return []
    said = {f"n_{s.value}": n for s, n in job.by_status.items()} | {
        f"{k}_tokens": n for k, n in job.usage.as_dict().items()
    }
    said |= {c: getattr(job, c) for c in COUNTER_COLUMNS if c not in said}
    return [f"{c}={said[c]} of_chunks={getattr(sums, c)}" for c in COUNTER_COLUMNS if said[c] != getattr(sums, c)]


_SUMS = select(
    *(func.coalesce(func.sum(chunk.c[c]), 0).label(c) for c in COUNTER_COLUMNS),
    func.count(chunk.c.unsummed_since_ms).label("unsummed"),
).where(chunk.c.job_id == bindparam("job"))


def chunks_count_what_the_ledger_says(conn: Connection, job: JobRecord) -> list[str]:
    """A chunk's calls, tokens and money are the sums of its lines in the ledger."""
    return [_different(r._mapping) for r in conn.execute(_CHUNKS_AND_LEDGER, {"job": job.id})]


def _sum(condition: ColumnElement[bool], value: Any) -> ColumnElement[Any]:
    return func.coalesce(func.sum(case((condition, value), else_=0)), 0)


_LEDGER_SUMS: dict[str, ColumnElement[Any]] = {
    "cost_nanousd": _sum(_SETTLED, call.c.cost_nanousd),
    "unknown_nanousd": _sum(_UNKNOWN, call.c.bound_nanousd),
    "wasted_nanousd": _sum(and_(_SETTLED, call.c.wasted), call.c.cost_nanousd),
    "calls": _sum(or_(_SETTLED, _UNKNOWN), 1),
    "unknown_calls": _sum(or_(_UNKNOWN, and_(_SETTLED, call.c.cost_nanousd.is_(None))), 1),
    **{c: _sum(_SETTLED, call.c[c]) for c in TOKEN_COLUMNS},
}


def _chunks_and_ledger() -> Select[Any]:
    sums = [s.label(n) for n, s in _LEDGER_SUMS.items()]
    lines = select(call.c.chunk_id, *sums).where(call.c.job_id == bindparam("job")).group_by(call.c.chunk_id)
    ledger_of = lines.subquery()
    said = {n: func.coalesce(ledger_of.c[n], 0) for n in _LEDGER_SUMS}
    columns = [c for n in _LEDGER_SUMS for c in (chunk.c[n], said[n].label(f"{n}_in_ledger"))]
    joined = chunk.outerjoin(ledger_of, ledger_of.c.chunk_id == chunk.c.id)
    different = or_(*(chunk.c[n] != said[n] for n in _LEDGER_SUMS))
    found = select(chunk.c.id.label("chunk"), *columns).select_from(joined)
    return found.where(chunk.c.job_id == bindparam("job"), different).limit(MOST_CASES)


_CHUNKS_AND_LEDGER = _chunks_and_ledger()


def _different(row: Any) -> str:
    pairs = ((n, row[n], row[f"{n}_in_ledger"]) for n in _LEDGER_SUMS)
    return " ".join((f"chunk={row['chunk']}", *(f"{n}={a} ledger={b}" for n, a, b in pairs if a != b)))


def a_budget_holds_what_the_ledger_says(conn: Connection, job: JobRecord) -> list[str]:
    """What a job with a budget holds is its settled cost and the bounds of its unknown and reserved calls."""
    if job.budget_nanousd is None:
        return []
    said = ledger.held(conn, job.id)
    return [] if said == job.held_nanousd else [f"held={job.held_nanousd} ledger={said}"]


def a_budget_is_kept(conn: Connection, job: JobRecord) -> list[str]:
    """What is spent, unknown and reserved is within the budget."""
    over = select(job_table.c.held_nanousd, job_table.c.budget_nanousd).where(
        job_table.c.id == job.id, job_table.c.held_nanousd > job_table.c.budget_nanousd
    )
    return cases(conn, over)


def ledger_lines_are_whole(conn: Connection, job: JobRecord) -> list[str]:
    """A line is open without an end, or ended with its time; only a settled one has a cost."""
    reserved = call.c.state == CallState.RESERVED
    ended = call.c.state.in_((CallState.SETTLED, CallState.VOID, CallState.UNKNOWN))
    wrong = or_(
        and_(reserved, call.c.settled_ms.is_not(None)),
        and_(ended, call.c.settled_ms.is_(None)),
        and_(~_SETTLED, call.c.cost_nanousd.is_not(None)),
        and_(~reserved, ~ended),
        call.c.last_row < call.c.first_row,
    )
    return cases(conn, select(*_LINE).where(call.c.job_id == job.id, wrong))


_LINE = (call.c.chunk_id.label("chunk"), call.c.fence, call.c.seq, call.c.state)


def no_call_outlives_its_attempt(conn: Connection, job: JobRecord) -> list[str]:
    """A call is reserved only while its attempt has the lease."""
    running = select(chunk.c.id).where(
        chunk.c.id == call.c.chunk_id, chunk.c.fence == call.c.fence, chunk.c.state == ChunkState.LEASED
    )
    reserved = call.c.state == literal_column("'reserved'")
    return cases(conn, select(*_LINE).where(call.c.job_id == job.id, reserved, ~running.exists()))


def every_call_has_its_chunk(conn: Connection, job: JobRecord) -> list[str]:
    """Each line names a chunk of its job and round, a fence that the chunk reached, and rows of the job."""
    own = select(chunk.c.id).where(
        chunk.c.id == call.c.chunk_id,
        chunk.c.job_id == call.c.job_id,
        chunk.c.round == call.c.round,
        chunk.c.fence >= call.c.fence,
    )
    lost = or_(~own.exists(), call.c.first_row < 0, call.c.last_row >= job.n_rows)
    return cases(conn, select(*_LINE).where(call.c.job_id == job.id, lost))


def a_result_costs_what_its_calls_cost(conn: Connection, job: JobRecord) -> list[str]:
    """The cost of a result is that of its row's calls in its round.

    At least those of its own attempt that were used, at most all of them: an attempt that lost its lease may have paid
    for the same row at the same time. Rows answered together with others share a call, and are left out.
    """
    of_row = and_(
        call.c.job_id == result.c.job_id,
        call.c.first_row == result.c.row,
        call.c.round == result.c.round,
        call.c.rows.is_(None),
        _SETTLED,
    )
    all_calls = func.coalesce(func.sum(call.c.cost_nanousd), 0)
    most = select(all_calls).where(of_row).scalar_subquery()
    own = and_(call.c.chunk_id == result.c.chunk_id, call.c.fence == result.c.fence, call.c.wasted.is_(False))
    least = select(all_calls).where(of_row, own).scalar_subquery()
    cost = func.coalesce(result.c.cost_nanousd, 0)
    shared = _shared().exists()
    found = select(result.c.row, cost.label("cost_nanousd"), least.label("least"), most.label("most"))
    return cases(conn, found.where(result.c.job_id == job.id, ~shared, or_(cost < least, cost > most)))


def _shared() -> Any:
    """Calls over many rows that may have covered a result's row."""
    return select(call.c.seq).where(
        call.c.job_id == result.c.job_id,
        call.c.rows.is_not(None),
        call.c.first_row <= result.c.row,
        call.c.last_row >= result.c.row,
        call.c.round == result.c.round,
    )


def a_result_has_its_calls(conn: Connection, job: JobRecord) -> list[str]:
    """A result counts at most the calls that the ledger has of its row in its round."""
    alone = select(func.count()).where(
        call.c.job_id == result.c.job_id,
        call.c.first_row == result.c.row,
        call.c.round == result.c.round,
        call.c.rows.is_(None),
        call.c.state != CallState.VOID,
    )
    together = _shared().with_only_columns(func.count()).where(call.c.state != CallState.VOID)
    lines = alone.scalar_subquery() + together.scalar_subquery()
    found = select(result.c.row, result.c.calls, lines.label("in_ledger"))
    return cases(conn, found.where(result.c.job_id == job.id, result.c.calls > lines))


INVARIANTS = (
    counters_are_the_results,
    the_job_counts_what_its_chunks_count,
    chunks_count_what_the_ledger_says,
    a_budget_holds_what_the_ledger_says,
    a_budget_is_kept,
    ledger_lines_are_whole,
    no_call_outlives_its_attempt,
    every_call_has_its_chunk,
    a_result_costs_what_its_calls_cost,
    a_result_has_its_calls,
)
