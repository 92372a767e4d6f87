"""Pausing, resuming and cancelling a job: SQL alone, which workers notice within a second or two."""

from __future__ import annotations

from batchmill_core.errors import JobError
from batchmill_core.job import JobState
from batchmill_db import jobs, loading, steering, telemetry
from batchmill_db.session import Connection, Database

PAUSED_BY_USER = "paused by the user"


def pause(database: Database, job_id: int, *, reason: str = PAUSED_BY_USER) -> bool:
    """Pauses an open job; answers whether this call did it. Raises JobError for one that has ended or is loading."""

    def work(conn: Connection) -> bool:
        if steering.pause(conn, job_id, kind="user", reason=reason):
            return True
        job = jobs.get(conn, job_id)
        if job.state is not JobState.PAUSED:
            raise JobError(f"job {job.public_id} is {job.state}; only an open job can be paused")
        return False

    return database.run(work)


def resume(database: Database, job_id: int, *, budget_nanousd: int | None = None) -> JobState:
    """Opens a paused job, and the account whose stop had paused it; answers the state the job had.

    Idempotent on an open job. Raises JobError for a job that has ended, or whose data set nobody reads to its end.
    """

    def work(conn: Connection) -> JobState:
        job = jobs.get(conn, job_id)
        if job.state is JobState.FAILED:
            raise JobError(f"job {job.public_id} could not be loaded ({job.reason}); submit the data set again")
        if job.state is JobState.PAUSED and not job.loaded and not loading.is_read(conn, job_id):
            raise JobError(
                f"the data set of job {job.public_id} was read to row {job.n_rows:,} only; run the command that began it again, "
                f"with --key {job.key}: it goes on from there (or keep what was answered: batchmill cancel {job.public_id})"
            )
        before = steering.resume(conn, job_id, budget_nanousd=budget_nanousd)
        if job.reason_kind == "account" and job.reason_account is not None:
            telemetry.heal_account(conn, job.reason_account)
        steering.finish(conn)  # its last rows may have ended while it was paused, and no worker be left to notice
        return before

    return database.run(work)


def cancel(database: Database, job_id: int) -> JobState:
    """Ends a job; answers the state it had. Idempotent. Raises JobError for one that is done."""
    return database.run(lambda conn: steering.cancel(conn, job_id))
