"""The figures of a job, as `show` prints them, and what surrounds it just now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchmill_core.job import JobState
from batchmill_core.request import BAD_STATUSES, RowStatus
from batchmill_core.usage import usd
from batchmill_db import chunks, counters, jobs, loading, saved_results, steering, telemetry
from batchmill_db.chunks import ChunkCounts
from batchmill_db.jobs import JobRecord
from batchmill_db.saved_results import ErrorSample
from batchmill_db.session import Connection, Database
from batchmill_db.telemetry import AccountState, WorkerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """One job as it stands, with its errors by kind (an example each) and the figures that follow from its counters."""

    job: JobRecord
    errors: Sequence[ErrorSample] = ()

    @property
    def seconds(self) -> float | None:
        """From the first claim to the last save; None before any row was saved."""
        first, last = self.job.first_claim_ms, self.job.last_save_ms
        return None if first is None or last is None else max(0, last - first) / 1000

    @property
    def rows_per_s(self) -> float | None:
        return self._per_s(self.job.done)

    @property
    def tokens_per_s(self) -> float | None:
        return self._per_s(self.job.usage.total)

    def _per_s(self, amount: int) -> float | None:
        return None if not self.seconds else amount / self.seconds

    @property
    def cost_nanousd(self) -> int | None:
        """What settled calls cost; None when calls were made and the cost of none of them is known."""
        job = self.job
        return None if job.calls and job.unknown_calls >= job.calls and not job.cost_nanousd else job.cost_nanousd

    @property
    def unknown_nanousd(self) -> int | None:
        """The most that calls of unknown cost may have cost; None when there are none, or none with a bound."""
        return self.job.unknown_nanousd or None

    @property
    def projected_nanousd(self) -> int | None:
        """What the whole job will cost if the rows to come cost what the rows so far did."""
        cost, done = self.cost_nanousd, self.job.done
        return None if cost is None or not done else cost * self.job.n_rows // done

    @property
    def by_status(self) -> Mapping[RowStatus, int]:
        """Rows by status, without the statuses that no row has. Rows that a cancelled job left open are cancelled."""
        counted = dict(self.job.by_status)
        if self.job.state is JobState.CANCELLED:
            counted[RowStatus.CANCELLED] += max(0, self.job.n_rows - self.job.done)
        return {s: n for s, n in counted.items() if n}

    @property
    def bad_rows(self) -> int:
        return sum(n for s, n in self.job.by_status.items() if s in BAD_STATUSES)

    def as_dict(self) -> dict[str, Any]:
        """The report under the ``--json`` keys, in their order. Amounts are decimal strings, unknown is None."""
        job = self.job
        return {
            "job_id": job.public_id,
            "name": job.name,
            "state": job.state.value,
            "reason": job.reason,
            "rows": job.n_rows,
            "done": job.done,
            "by_status": {s.value: n for s, n in self.by_status.items()},
            "errors": {e.kind: {"count": e.count, "row": e.row, "message": e.message} for e in self.errors},
            "usage": job.usage.as_dict(),
            "cost_usd": usd(self.cost_nanousd),
            "unknown_usd": usd(self.unknown_nanousd),
            "rows_per_s": _rounded(self.rows_per_s),
            "tokens_per_s": _rounded(self.tokens_per_s),
            "seconds": _rounded(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A job's report with what surrounds it: its chunks, the calls in flight, the workers and accounts there are."""

    report: JobReport
    chunks: ChunkCounts
    in_flight: int = 0
    workers: Sequence[WorkerRecord] = ()
    unfit: Sequence[WorkerRecord] = ()
    accounts: Mapping[str, AccountState] | None = None
    is_read: bool = True  # its data set was read to its end, or somebody is at it

    def unserved(self) -> list[str]:
        """Queues with rows of this job that no live worker takes from."""
        served = {q for w in self.workers for q in w.queues}
        return sorted(q for q in self.chunks.queues if q not in served)

    def nothing_left(self) -> bool:
        """Whether the job is open although each of its rows has its status and no chunk is to be done."""
        job = self.report.job
        return job.state is JobState.OPEN and job.loaded and not self.chunks.queues


def read_report(database: Database, job_id: int) -> JobReport:
    """The job's report, its counters added up afresh. Raises JobError when there is no such job."""
    return database.run(lambda conn: _report(conn, job_id))


def read_situation(database: Database, job_id: int, *, patience_s: float = 5.0) -> Situation:
    """The job and what surrounds it, in one transaction. Raises JobError, or DatabaseUnavailable after the patience."""

    def read(conn: Connection) -> Situation:
        workers = telemetry.live_workers(conn)
        return Situation(
            report=_report(conn, job_id),
            chunks=chunks.counts(conn, job_id),
            # Calls are booked a little ahead of being sent; what workers have on the wire is never more than that.
            in_flight=min(steering.reserved_calls(conn, job_id), sum(w.in_flight for w in workers)),
            workers=workers,
            unfit=telemetry.unfit_workers(conn),
            accounts=telemetry.accounts(conn),
            is_read=loading.is_read(conn, job_id) or jobs.get(conn, job_id).loaded,
        )

    return database.run(read, patience_s=patience_s)


def list_reports(database: Database, *, limit: int = 1000) -> list[JobReport]:
    """Reports of the newest jobs, newest first."""

    def read(conn: Connection) -> list[JobReport]:
        counters.sum_counters(conn)
        return [_with_errors(conn, job) for job in jobs.newest(conn, limit=limit)]

    return database.run(read)


def _report(conn: Connection, job_id: int) -> JobReport:
    counters.sum_counters(conn, [job_id])
    return _with_errors(conn, jobs.get(conn, job_id))


def _with_errors(conn: Connection, job: JobRecord) -> JobReport:
    answered = job.by_status[RowStatus.OK] + job.by_status[RowStatus.TRUNCATED]
    return JobReport(job=job, errors=() if job.done == answered else saved_results.errors_by_kind(conn, job.id))


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)
