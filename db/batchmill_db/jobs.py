"""Statements about jobs, their rounds and their payloads."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    update,
)

from batchmill_core.errors import JobError
from batchmill_core.job import (
    CONTRACT_VERSION,
    FINAL_JOB_STATES,
    ChunkState,
    JobState,
    Rows,
    Spec,
    check_transition,
    sources_of,
)
from batchmill_core.request import STATUSES, RowStatus
from batchmill_core.usage import Usage, usd

from . import ledger
from .bulk import Bulk, insert_for
from .chunks import dead_rows
from .results import NOT_OK, finished
from .schema import COUNTER_COLUMNS, TOKEN_COLUMNS, call, chunk, job, payload, result, round_
from .session import now_ms

_NAMES_LOOKED_AT = 200
_READY = chunk.c.state == literal_column("'ready'")  # in a literal, so that the partial indexes serve
_ID_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What `create` needs; ``submission`` is what the user asked for, to tell whether the same key means the same."""

    name: str
    model: str
    spec: Spec
    source: str | None = None
    key: str | None = None
    priority: int = 5
    budget_nanousd: int | None = None
    submission: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job as it stands in SQL, with counters as last summed from its chunks."""

    id: int
    public_id: str
    key: str | None
    name: str
    state: JobState
    reason_kind: str | None
    reason: str | None
    reason_account: str | None
    loaded: bool
    task: str
    model: str
    source: str | None
    round: int
    priority: int
    n_rows: int
    n_skipped: int
    skipped: Sequence[Mapping[str, Any]]
    columns: Sequence[str]
    submission: Mapping[str, Any]
    budget_nanousd: int | None
    held_nanousd: int
    by_status: Mapping[RowStatus, int]
    usage: Usage
    cost_nanousd: int
    unknown_nanousd: int
    wasted_nanousd: int
    calls: int
    unknown_calls: int
    created_ms: int
    opened_ms: int | None
    first_claim_ms: int | None
    last_save_ms: int | None
    finished_ms: int | None

    @property
    def done(self) -> int:
        """Rows that have a final status."""
        return sum(self.by_status.values())

    @property
    def ended(self) -> bool:
        return self.state in FINAL_JOB_STATES


def create(conn: Connection, new: NewJob) -> int:
    """Inserts a job in state `loading` with its first round; answers its id.

    Not idempotent by itself: a job with a key is created once because `key` is unique (look first, see `by_key`).
    """
    made: int = conn.execute(
        insert(job)
        .values(
            public_id="".join(secrets.choice(_ID_ALPHABET) for _ in range(8)),
            key=new.key,
            name=new.name,
            state=JobState.LOADING,
            contract=CONTRACT_VERSION,
            task=new.spec.task,
            model=new.model,
            source=new.source,
            priority=new.priority,
            budget_nanousd=new.budget_nanousd,
            submission=json.dumps(dict(new.submission)),
            created_ms=now_ms(),
        )
        .returning(job.c.id)
    ).scalar_one()
    add_round(conn, made, 1, new.spec)
    return made


def add_round(conn: Connection, job_id: int, number: int, spec: Spec, *, statuses: Sequence[str] = ()) -> None:
    """Freezes the spec of a round. Raises IntegrityError when the round is there already."""
    conn.execute(
        insert(round_).values(
            job_id=job_id,
            round=number,
            spec=json.dumps(spec.as_dict()),
            statuses=",".join(statuses) or None,
            created_ms=now_ms(),
        )
    )


def spec_of(conn: Connection, job_id: int, number: int) -> Spec:
    """The frozen spec of one round. Reads only."""
    text = conn.execute(select(round_.c.spec).where(round_.c.job_id == job_id, round_.c.round == number)).scalar_one()
    return Spec.from_dict(json.loads(text))


def set_first_spec(conn: Connection, job_id: int, spec: Spec) -> None:
    """Replaces the spec of round 1 while the job is still loading. Idempotent."""
    conn.execute(
        update(round_).where(round_.c.job_id == job_id, round_.c.round == 1).values(spec=json.dumps(spec.as_dict()))
    )


def get(conn: Connection, job_id: int) -> JobRecord:
    """The job with this inner id. Raises JobError when there is none."""
    found = conn.execute(select(job).where(job.c.id == job_id)).one_or_none()
    if found is None:
        raise JobError(f"there is no job number {job_id}; `batchmill jobs` lists them")
    return _record(found)


def find(conn: Connection, reference: str) -> JobRecord:
    """The job that a user means: by public id, by key, or the newest of that name. Raises JobError when none is."""
    found = conn.execute(
        select(job)
        .where(or_(job.c.public_id == reference, job.c.key == reference, job.c.name == reference))
        .order_by(case((job.c.public_id == reference, 0), (job.c.key == reference, 1), else_=2), job.c.id.desc())
        .limit(1)
    ).one_or_none()
    if found is None:
        raise JobError(f"there is no job {reference!r}; {_near(conn, reference)}`batchmill jobs` lists them")
    return _record(found)


def _near(conn: Connection, reference: str) -> str:
    """The name of a newer job that is nearly this, as a question; nothing where none is."""
    newest = select(job.c.name).order_by(job.c.id.desc()).limit(_NAMES_LOOKED_AT)
    close = get_close_matches(reference, conn.execute(newest).scalars().all(), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def by_key(conn: Connection, key: str) -> JobRecord | None:
    found = conn.execute(select(job).where(job.c.key == key)).one_or_none()
    return None if found is None else _record(found)


def newest(conn: Connection, *, limit: int = 1000) -> list[JobRecord]:
    """Jobs, newest first."""
    return [_record(r) for r in conn.execute(select(job).order_by(job.c.id.desc()).limit(limit))]


def states(conn: Connection, job_ids: Sequence[int]) -> dict[int, JobState]:
    """States of some jobs, for workers to notice pause and cancel."""
    rows = conn.execute(select(job.c.id, job.c.state).where(job.c.id.in_(job_ids)))
    return {r.id: JobState(r.state) for r in rows}


def add_payloads(conn: Connection, job_id: int, payloads: Sequence[tuple[int, int, bytes, bytes, str]]) -> set[int]:
    """Saves rows: (first row, rows, requests frame, inputs frame, digest) each; answers the first rows that were new.

    Idempotent: a payload that is there already is left alone.
    """
    insert_ = insert_for(conn.dialect.name)
    names = ("first_row", "n_rows", "requests", "inputs", "digest")
    values = [{"job_id": job_id, **dict(zip(names, p, strict=True))} for p in payloads]
    statement = insert_(payload).on_conflict_do_nothing().returning(payload.c.first_row)
    return set(conn.execute(statement, values).scalars())


def renew(conn: Connection, job_id: int, new: NewJob) -> None:
    """Replaces what a job that is loaded anew, or gone on with, was submitted with. Idempotent."""
    conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.LOADING)
        .values(
            name=new.name,
            model=new.model,
            task=new.spec.task,
            source=new.source,
            priority=new.priority,
            budget_nanousd=new.budget_nanousd,
            submission=json.dumps(dict(new.submission)),
        )
    )
    set_first_spec(conn, job_id, new.spec)


def lock_state(conn: Connection, job_id: int) -> JobState | None:
    """The job's state, which nobody changes before this transaction ends; None when there is no such job."""
    state = conn.execute(select(job.c.state).where(job.c.id == job_id).with_for_update(key_share=True))
    found = state.scalar_one_or_none()
    return None if found is None else JobState(found)


def payload_digests(conn: Connection, job_id: int) -> Iterator[tuple[int, int, str]]:
    """(first row, rows, digest) of what is loaded, in row order, for a loader that resumes."""
    rows = conn.execute(
        select(payload.c.first_row, payload.c.n_rows, payload.c.digest)
        .where(payload.c.job_id == job_id)
        .order_by(payload.c.first_row)
    )
    for r in rows:
        yield r.first_row, r.n_rows, r.digest


def requests_of(conn: Connection, job_id: int, rows: Rows) -> list[tuple[int, int, bytes]]:
    """Payload frames (first row, rows, requests frame) that hold any of these rows, in row order."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for first, last in _coarse(rows):
        # Payloads follow each other without gaps, so the one that holds a row is the last that begins at or before it.
        begin = select(func.max(payload.c.first_row)).where(payload.c.job_id == job_id, payload.c.first_row <= first)
        frames = conn.execute(
            select(payload.c.first_row, payload.c.n_rows, payload.c.requests)
            .where(payload.c.job_id == job_id, payload.c.first_row.between(begin.scalar_subquery(), last))
            .order_by(payload.c.first_row)
        )
        found.update({r.first_row: (r.first_row, r.n_rows, r.requests) for r in frames})
    return [found[first] for first in sorted(found)]


def inputs_after(conn: Connection, job_id: int, first_row: int) -> tuple[int, int, bytes] | None:
    """The first payload at or after this row: (first row, rows, inputs frame); None at the end."""
    found = conn.execute(
        select(payload.c.first_row, payload.c.n_rows, payload.c.inputs)
        .where(payload.c.job_id == job_id, payload.c.first_row >= first_row)
        .order_by(payload.c.first_row)
        .limit(1)
    ).one_or_none()
    return None if found is None else (found.first_row, found.n_rows, found.inputs)


def set_progress(
    conn: Connection,
    job_id: int,
    *,
    n_rows: int,
    n_skipped: int,
    skipped: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
) -> None:
    """Notes how far the loader has come. Idempotent."""
    conn.execute(
        update(job)
        .where(job.c.id == job_id)
        .values(
            n_rows=n_rows, n_skipped=n_skipped, skipped=json.dumps(list(skipped)), columns=json.dumps(list(columns))
        )
    )


def mark_loaded(conn: Connection, job_id: int) -> bool:
    """`loading` to `open`, now that every row is saved. Idempotent: answers whether this call did it."""
    done = conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.LOADING)
        .values(loaded=True, state=JobState.OPEN, opened_ms=now_ms())
    )
    return done.rowcount == 1


def fail_loading(conn: Connection, job_id: int, reason: str) -> None:
    """`loading` to `failed`: drops what was loaded, since the job is refused as a whole. Idempotent."""
    moved = conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.LOADING)
        .values(state=JobState.FAILED, reason_kind="source", reason=reason, finished_ms=now_ms(), n_rows=0)
    )
    if moved.rowcount:
        conn.execute(delete(payload).where(payload.c.job_id == job_id))
        conn.execute(delete(chunk).where(chunk.c.job_id == job_id))


def reload(conn: Connection, job_id: int) -> None:
    """`failed` back to `loading`, when the same key is submitted again. Idempotent."""
    conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.FAILED)
        .values(state=JobState.LOADING, reason=None, reason_kind=None, finished_ms=None)
    )


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


def reopen(conn: Connection, job_id: int, number: int) -> bool:
    """`done` to `open` in round ``number``; answers whether this call did it."""
    done = conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.DONE, job.c.round == number - 1)
        .values(state=JobState.OPEN, round=number, finished_ms=None)
    )
    return done.rowcount == 1


def rows_of_status(conn: Connection, job_id: int, statuses: Sequence[RowStatus]) -> Rows:
    """The rows of a job whose result has one of these statuses, or which are dead without a result."""
    numbers: set[int] = set()
    for status in statuses:
        wanted = select(result.c.row).where(result.c.job_id == job_id, result.c.status == status)
        if status is not RowStatus.OK:
            wanted = wanted.where(NOT_OK)
        numbers.update(conn.execute(wanted).scalars())
    if RowStatus.DEAD in statuses and (dead := Rows.of(dead_rows(conn, job_id))):
        numbers.update(set(dead) - finished(conn, job_id, dead, 0))
    return Rows.of(numbers)


def remove(conn: Connection, job_id: int) -> None:
    """Removes a job that has ended, with payloads and results; the ledger keeps its calls.

    Raises JobError when the job is still running.
    """
    now = get(conn, job_id)
    if not now.ended:
        raise JobError(f"job {now.public_id} is {now.state}; cancel it before you remove it")
    ledger.orphan_job(conn, job_id)
    for table in (result, payload, chunk, round_):
        conn.execute(delete(table).where(table.c.job_id == job_id))
    conn.execute(delete(job).where(job.c.id == job_id))


def sum_counters(conn: Connection, job_ids: Sequence[int] | None = None) -> None:
    """Adds what chunks counted since the last time to their jobs, whatever state these are in. Idempotent.

    Touches only chunks whose counters moved: at 100,000 chunks a sum over all takes a good part of each second. A chunk
    that is being saved at the moment is left for the next time.
    """
    moved = select(
        chunk.c.id, chunk.c.job_id, chunk.c.summed, chunk.c.first_claim_ms, chunk.c.last_save_ms, *_COUNTERS
    ).where(chunk.c.unsummed_since_ms > 0)
    if job_ids is not None:
        moved = moved.where(chunk.c.job_id.in_(job_ids))
    chunks = conn.execute(moved.with_for_update(skip_locked=True)).all()
    by_job: dict[int, list[Any]] = {}
    for c in chunks:
        by_job.setdefault(c.job_id, []).append(c)
    _SUMMED.run(conn, [(json.dumps(_counted(c)), c.id) for c in chunks])
    for job_id, its in sorted(by_job.items()):
        _add_to_job(conn, job_id, its)


_COUNTERS = [chunk.c[c] for c in COUNTER_COLUMNS]
_SUMMED = Bulk(
    ("b_summed", "b_chunk"),
    lambda _: (
        update(chunk)
        .where(chunk.c.id == bindparam("b_chunk"))
        .values(summed=bindparam("b_summed"), unsummed_since_ms=null())
    ),
)


def _counted(c: Any) -> dict[str, int]:
    return {name: n for name in COUNTER_COLUMNS if (n := getattr(c, name))}


def _add_to_job(conn: Connection, job_id: int, chunks: Sequence[Any]) -> None:
    gains = dict.fromkeys(COUNTER_COLUMNS, 0)
    for c in chunks:
        for name, n in _counted(c).items():
            gains[name] += n
        for name, n in json.loads(c.summed or "{}").items():
            gains[name] -= n
    values: dict[str, Any] = {name: job.c[name] + n for name, n in gains.items() if n}
    claims = [c.first_claim_ms for c in chunks if c.first_claim_ms is not None]
    saves = [c.last_save_ms for c in chunks if c.last_save_ms is not None]
    if claims:
        values["first_claim_ms"] = case((job.c.first_claim_ms <= min(claims), job.c.first_claim_ms), else_=min(claims))
    if saves:
        values["last_save_ms"] = case((job.c.last_save_ms >= max(saves), job.c.last_save_ms), else_=max(saves))
    if values:
        conn.execute(update(job).where(job.c.id == job_id).values(**values))


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


def _coarse(rows: Rows, most: int = 50) -> list[tuple[int, int]]:
    """At most ``most`` ranges that cover the rows, so that a scattered set makes no endless statement."""
    ranges = list(rows.ranges)
    if len(ranges) <= most:
        return ranges
    step = -(-len(ranges) // most)
    return [(ranges[i][0], ranges[min(i + step, len(ranges)) - 1][1]) for i in range(0, len(ranges), step)]


def _record(r: Row[Any]) -> JobRecord:
    m = r._mapping
    return JobRecord(
        **{
            k: m[k]
            for k in (
                "id",
                "public_id",
                "key",
                "name",
                "reason_kind",
                "reason",
                "reason_account",
                "task",
                "model",
                "source",
                "round",
                "priority",
                "n_rows",
                "n_skipped",
                "budget_nanousd",
                "held_nanousd",
                "cost_nanousd",
                "unknown_nanousd",
                "wasted_nanousd",
                "calls",
                "unknown_calls",
                "created_ms",
                "opened_ms",
                "first_claim_ms",
                "last_save_ms",
                "finished_ms",
            )
        },
        state=JobState(m["state"]),
        loaded=bool(m["loaded"]),
        skipped=json.loads(m["skipped"] or "[]"),
        columns=json.loads(m["columns"] or "[]"),
        submission=json.loads(m["submission"] or "{}"),
        by_status={s: m[f"n_{s.value}"] for s in STATUSES},
        usage=Usage(**{c.removesuffix("_tokens"): m[c] for c in TOKEN_COLUMNS}),
    )
