"""Statements about jobs: made, found, loaded, removed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from sqlalchemy import (
    Connection,
    Row,
    case,
    delete,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from batchmill_core.errors import JobError
from batchmill_core.job import (
    CONTRACT_VERSION,
    FINAL_JOB_STATES,
    JobState,
    Spec,
)
from batchmill_core.request import STATUSES, RowStatus
from batchmill_core.usage import Usage

from . import ledger
from .rounds import add_round, set_first_spec
from .schema import TOKEN_COLUMNS, chunk, job, payload, result, round_
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
