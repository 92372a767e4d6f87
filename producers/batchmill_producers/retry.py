"""The next round of a job: rows of some statuses are asked again, old results stay until they are replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from batchmill_core.errors import JobError
from batchmill_core.job import JobState, Rows, Spec
from batchmill_core.request import BAD_STATUSES, RowStatus
from batchmill_core.settings import Settings
from batchmill_db import chunks, jobs, reaping, rounds
from batchmill_db.chunks import NewChunk
from batchmill_db.session import Connection, Database

from .chunking import default_chunk_size
from .params import check_params
from .submit import check_budget, make_step


def retry(
    database: Database,
    settings: Settings,
    job_id: int,
    *,
    statuses: Iterable[RowStatus] | None = None,
    model: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> int:
    """Opens the next round for the rows of these statuses (default: those that ended badly); answers how many.

    ``model`` and ``params`` change what is asked in this round. With no such row nothing happens and 0 is answered.
    Raises JobError unless the job is done.
    """
    check_params(params or {})
    wanted = tuple(BAD_STATUSES if statuses is None else statuses)
    with database.reading() as conn:
        job = jobs.get(conn, job_id)
        spec = rounds.spec_of(conn, job_id, job.round)
    if job.state is not JobState.DONE:
        raise JobError(f"job {job.public_id} is {job.state}; only a job that is done can be retried")
    spec, size = _next_spec(settings, spec, model, params or {})
    if job.budget_nanousd is not None:
        check_budget(spec)
    number = job.round + 1
    return database.run(lambda conn: _open_round(conn, job_id, number, spec, wanted, size, job.priority))


def _next_spec(settings: Settings, spec: Spec, model: str | None, params: Mapping[str, Any]) -> tuple[Spec, int]:
    name = model or spec.steps[0].model
    entry = settings.catalog.model(name)
    account = None if entry.account is None else settings.catalog.account(entry.account)
    steps = (make_step(entry, account),) if model is not None else spec.steps
    return replace(spec, steps=steps, params={**spec.params, **params}), default_chunk_size(entry, account)


def _open_round(
    conn: Connection, job_id: int, number: int, spec: Spec, statuses: tuple[RowStatus, ...], size: int, priority: int
) -> int:
    """One transaction. Idempotent: the round opens once."""
    rows = rounds.rows_of_status(conn, job_id, statuses)
    if not len(rows):
        return 0
    if not rounds.reopen(conn, job_id, number):
        return len(rows)
    rounds.add_round(conn, job_id, number, spec, statuses=[s.value for s in statuses])
    if RowStatus.DEAD in statuses:
        reaping.clear_dead(conn, job_id)
    numbers = list(rows)
    groups = (Rows.of(numbers[i : i + size]) for i in range(0, len(numbers), size))
    queue = spec.steps[0].queue
    chunks.add(conn, job_id, (NewChunk(rows=g, queue=queue, round=number, priority=priority) for g in groups))
    return len(rows)
