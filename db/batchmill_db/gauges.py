"""What the metrics page reads: counts over jobs, chunks, workers, calls and devices, and sums over the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, Label, func, literal_column, select

from batchmill_core.errors import CallState
from batchmill_core.job import FINAL_JOB_STATES
from batchmill_core.usage import TOKEN_KINDS

from . import doorbells, jobs, samples, telemetry
from .jobs import JobRecord
from .samples import Newest
from .schema import TOKEN_COLUMNS, account, call, job
from .telemetry import WorkerRecord

_LOCAL = "local"  # the account of calls that no provider answers, as in ``costs --by account``


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """How everything stands at one moment; cheap to read, however many rows and calls there are."""

    job_states: Mapping[str, int]
    jobs: Sequence[JobRecord]
    queues: Mapping[str, tuple[int, int]]  # chunks (ready, leased)
    workers: Sequence[WorkerRecord]
    unfit: Sequence[WorkerRecord]
    in_flight: Mapping[tuple[str, str], int]  # calls by (account, model)
    stopped_accounts: Sequence[str]
    devices: Sequence[Newest]


def read(conn: Connection, *, ended_jobs: int) -> Gauges:
    """``jobs`` are all that have not ended, and the newest ``ended_jobs`` of the others. Reads only."""
    states = conn.execute(select(job.c.state, func.count()).group_by(job.c.state))
    stopped = select(account.c.name).where(account.c.state == "stopped").order_by(account.c.name)
    return Gauges(
        job_states={str(state): count for state, count in states},
        jobs=_jobs(conn, ended_jobs),
        queues=doorbells.queues_with_work(conn),
        workers=telemetry.live_workers(conn),
        unfit=telemetry.unfit_workers(conn),
        in_flight=_in_flight(conn),
        stopped_accounts=list(conn.execute(stopped).scalars()),
        devices=samples.newest(conn),
    )


def _jobs(conn: Connection, ended: int) -> list[JobRecord]:
    final = [str(state) for state in FINAL_JOB_STATES]
    going = conn.execute(select(job.c.id).where(job.c.state.not_in(final))).scalars()
    newest = conn.execute(select(job.c.id).where(job.c.state.in_(final)).order_by(job.c.id.desc()).limit(ended))
    return [jobs.get(conn, job_id) for job_id in sorted({*going, *newest.scalars()})]


def _in_flight(conn: Connection) -> dict[tuple[str, str], int]:
    key = (_account_of_call(), call.c.model)
    reserved = call.c.state == literal_column("'reserved'")  # as the index says it: there are few of them
    found = conn.execute(select(*key, func.count()).where(reserved).group_by(*key))
    return {(str(name), str(model)): count for name, model, count in found}


def _account_of_call() -> Label[str]:
    """Labelled, so that GROUP BY names it: PostgreSQL takes two parameters for two expressions."""
    return func.coalesce(call.c.account, _LOCAL).label("account_name")


@dataclass(slots=True, kw_only=True)
class Spent:
    """Sums over the ledger for one account and model; money in nano-USD."""

    account: str
    model: str
    calls: Counter[str] = field(default_factory=Counter)  # by state
    tokens: Counter[str] = field(default_factory=Counter)  # by kind
    settled: int = 0
    wasted: int = 0  # of the settled: its answer was not used
    unknown: int = 0  # upper bound of what was sent and not heard of again
    reserved: int = 0  # upper bound of calls in flight
    unpriced_calls: int = 0  # sent, and not even a bound of their cost is known


def spent(conn: Connection) -> list[Spent]:
    """The whole ledger by account and model. Reads every call: not for each second once there are millions."""
    key = (_account_of_call(), call.c.model, call.c.state, call.c.wasted)
    sums: list[ColumnElement[int]] = [func.count(), func.count(call.c.cost_nanousd), func.count(call.c.bound_nanousd)]
    sums += [func.sum(call.c[c]) for c in ("cost_nanousd", "bound_nanousd", *TOKEN_COLUMNS)]
    found: dict[tuple[str, str], Spent] = {}
    for name, model, state, wasted, *figures in conn.execute(select(*key, *sums).group_by(*key)):
        total = found.setdefault((name, model), Spent(account=name, model=model))
        _add(total, CallState(state), bool(wasted), [int(n or 0) for n in figures])
    return [found[k] for k in sorted(found)]


def _add(total: Spent, state: CallState, wasted: bool, figures: Sequence[int]) -> None:
    calls, with_cost, with_bound, cost, bound, *tokens = figures
    total.calls[state.value] += calls
    total.tokens.update(dict(zip(TOKEN_KINDS, tokens, strict=True)))
    match state:
        case CallState.SETTLED:
            total.settled += cost
            total.wasted += cost if wasted else 0
            total.unpriced_calls += calls - with_cost
        case CallState.UNKNOWN:
            total.unknown += bound
            total.unpriced_calls += calls - with_bound
        case CallState.RESERVED:
            total.reserved += bound
        case CallState.VOID:
            pass
