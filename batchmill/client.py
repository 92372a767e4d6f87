"""Client and Job: submitting and handling jobs from Python."""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from batchmill_core.settings import Settings
from batchmill_core.usage import usd
from batchmill_db import chunks, costs, jobs
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Connection, Database
from batchmill_ops.live_screen import screen_for
from batchmill_ops.progress import OWN_PATIENCE_S, Follower, Silent, Unseen
from batchmill_ops.report import JobReport, list_reports, read_report
from batchmill_ops.stack import Stack, attach
from batchmill_ops.waits import start_a_worker, wait_for_own
from batchmill_producers.export import Result, stream_results
from batchmill_producers.retry import retry
from batchmill_producers.submit import Submission, prepare, submit

from .asked import parse_budget, statuses_of
from .control import cancel, pause, resume
from .opening import doorbell, open_database


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """What a job's calls cost, by the ledger, in USD as decimal strings.

    ``settled`` is known; ``unknown`` is an upper bound of calls that may have been billed; ``wasted`` is the part of
    ``settled`` whose answers were not used; ``reserved`` bounds the calls in flight. None: there is no figure.
    """

    settled: str | None
    unknown: str | None
    wasted: str | None
    reserved: str | None


@dataclass(kw_only=True)
class Client:
    """One configuration: its database, and with no broker configured its folder's embedded stack while jobs need it."""

    settings: Settings
    _database: Database | None = None
    _stack: Stack | None = None
    _held_for: set[int] = field(default_factory=set)
    _reading: int = 0  # data sets that are being read just now; their jobs will want the stack
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def database(self) -> Database:
        """The database, opened and made at the first use."""
        with self._lock:
            if self._database is None:
                self._database = open_database(self.settings, make=True)
            return self._database

    def submit(self, submission: Submission) -> Job:
        """Saves the data set as a job and opens it; with no broker configured, starts workers here. See `submit`."""
        prepared = prepare(submission, self.settings)  # before anything is started for what is refused
        with self._lock:
            stack = self._attached()
            self._reading += 1
        opened: list[int] = []

        def open_(record: JobRecord) -> None:
            opened.append(record.id)
            self.hold(record.id)

        try:
            with doorbell(self.settings, stack.broker_url) as ring:
                record = submit(self.database, self.settings, submission, ring=ring, opened=open_, prepared=prepared)
            self.hold(record.id)
            return Job(self, record)
        except BaseException:
            for job_id in opened:
                self.let_go(job_id)
            raise
        finally:
            with self._lock:
                self._reading -= 1

    def job(self, reference: str) -> Job:
        """The job with this id or key, or the newest of this name. Raises JobError when there is none."""
        with self.database.reading() as conn:
            return Job(self, jobs.find(conn, reference))

    def jobs(self, *, limit: int = 1000) -> list[Job]:
        """The newest jobs, newest first."""
        return [Job(self, report.job) for report in list_reports(self.database, limit=limit)]

    def hold(self, job_id: int) -> Stack:
        """Keeps workers for a job, with no broker configured; idempotent. ``let_go`` ends it."""
        with self._lock:
            stack = self._attached()
            if self.settings.embedded:
                with self.database.reading() as conn:
                    stack.serve(chunks.counts(conn, job_id).queues)
                self._held_for.add(job_id)
            return stack

    def let_go(self, job_id: int) -> None:
        """Ends the hold for a job; with the last one the embedded stack drains and stops. Idempotent."""
        with self._lock:
            self._held_for.discard(job_id)
            if not self._held_for and not self._reading and self._stack is not None:
                stack, self._stack = self._stack, None
                stack.stop()

    def _attached(self) -> Stack:
        if self._stack is None:
            self._stack = attach(self.settings)
            atexit.register(self.close)
        return self._stack

    def close(self) -> None:
        """Stops the embedded stack, if it was the last to use it, and closes the database. Idempotent."""
        with self._lock:
            self._held_for.clear()
            stack, self._stack = self._stack, None
            database, self._database = self._database, None
        atexit.unregister(self.close)
        if stack is not None:
            stack.stop()
        if database is not None:
            database.close()


class Job:
    """One job. Its figures are read from the database at each call."""

    def __init__(self, client: Client, record: JobRecord) -> None:
        self._client = client
        self._number = record.id
        self.id = record.public_id
        self.name = record.name

    def __repr__(self) -> str:
        return f"Job({self.id!r}, name={self.name!r})"

    @property
    def state(self) -> str:
        """``loading open paused done cancelled failed``."""
        with self._client.database.reading() as conn:
            return jobs.get(conn, self._number).state.value

    def report(self) -> JobReport:
        """Rows by status, errors, usage, cost and rates."""
        return read_report(self._client.database, self._number)

    def wait(self, *, progress: bool = False, timeout: float | None = None, give_up_after: float | None = None) -> Job:
        """Waits until the job is done; answers the job itself. ``timeout`` and ``give_up_after`` are in seconds.

        With no broker configured, workers run here meanwhile and stop afterwards. Else it waits for workers as long as it
        takes, and says once when there is none. Raises JobStopped when the job cannot go on: it is paused or cancelled,
        no worker can start here, or none was there for ``give_up_after``. TimeoutError when time is up.
        """
        stack = self._client.hold(self._number)
        own = self._client.settings.embedded
        patience_s = OWN_PATIENCE_S if own else math.inf
        follower = Follower(
            database=self._client.database,
            job_id=self._number,
            screen=screen_for(Console(stderr=True)) if progress else Silent() if own else Unseen(),
            remedy=wait_for_own if own else start_a_worker,
            unfit=stack.unfit,
            patience_s=patience_s if give_up_after is None else give_up_after,
        )
        try:
            follower.wait(timeout_s=timeout)
        except TimeoutError:
            raise
        except BaseException:
            self._client.let_go(self._number)
            raise
        self._client.let_go(self._number)
        return self

    def results(self, *, status: str | Iterable[str] | None = None) -> Iterator[Result]:
        """Results in row order, streamed; rows that have none yet are left out. ``status`` picks some."""
        return stream_results(self._client.database, self._number, statuses=statuses_of(status))

    def cost(self) -> JobCost:
        """What the job's calls cost, by the ledger."""

        def read(conn: Connection) -> JobCost:
            sums = costs.spending(conn, job_id=self._number)
            s = sums[0] if sums else costs.Spending()
            known = s.settled_nanousd or s.calls > s.unbounded or not s.calls
            return JobCost(
                settled=usd(s.settled_nanousd) if known else None,
                unknown=usd(s.unknown_nanousd) if s.unknown_calls and s.unknown_nanousd else None,
                wasted=usd(s.wasted_nanousd) if known else None,
                reserved=usd(s.reserved_nanousd),
            )

        return self._client.database.run(read)

    def pause(self) -> None:
        """Sends no more calls; those in flight finish. Raises JobError for a job that has ended."""
        pause(self._client.database, self._number)

    def resume(self, *, budget_usd: float | str | None = None) -> None:
        """Goes on, with a new budget if one is given; a stopped account of the job is tried again."""
        budget = None if budget_usd is None else parse_budget(budget_usd)
        resume(self._client.database, self._number, budget_nanousd=budget)
        self._client.hold(self._number)

    def cancel(self) -> None:
        """Ends the job; rows without an answer stay so. Raises JobError for one that is done."""
        cancel(self._client.database, self._number)

    def retry(
        self,
        *,
        status: str | Iterable[str] | None = None,
        model: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> int:
        """Asks rows of these statuses again (default: failed, invalid, too_long, dead); answers how many.

        ``model`` and ``params`` change what is asked. Old results stay until they are replaced.
        """
        client = self._client
        count = retry(
            client.database, client.settings, self._number, statuses=statuses_of(status), model=model, params=params
        )
        if count:
            client.hold(self._number)
        return count
