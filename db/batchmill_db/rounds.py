"""Statements about a job's rounds: the frozen spec of each, and which rows the next one asks again."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import (
    Connection,
    insert,
    select,
    update,
)

from batchmill_core.job import (
    JobState,
    Rows,
    Spec,
)
from batchmill_core.request import RowStatus

from .reaping import dead_rows
from .saved_results import NOT_OK, finished
from .schema import job, result, round_
from .session import now_ms


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
