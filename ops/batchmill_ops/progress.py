"""Follows a job until it ends or cannot go on, and shows how it goes: live on a terminal, else in plain lines."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rich.console import Console

from batchmill_core.errors import BatchmillError, JobStopped
from batchmill_core.job import JobState
from batchmill_core.usage import dollars
from batchmill_db import steering
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Database, DatabaseUnavailable

from .figures import duration, one_line, percent, rate
from .rates import Pace, PaceMeter
from .report import JobReport, Situation, read_situation
from .waits import Remedy, nobody_serves, start_a_worker, stopped_because, why_waiting

log = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
OWN_PATIENCE_S = 120.0  # without a live worker where this process runs them: one that died is started again
_DATABASE_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a screen shows at one moment. ``waits`` says why rows wait, the weightiest reason first."""

    situation: Situation
    pace: Pace = field(default_factory=Pace)
    waits: Sequence[str] = ()

    @property
    def report(self) -> JobReport:
        return self.situation.report


class Screen(Protocol):
    """Shows views, one after the other, until it is closed."""

    def show(self, view: View) -> None: ...

    def close(self) -> None:
        """Leaves the terminal as it was. Idempotent."""


class Silent:
    """A screen for those who wait without looking."""

    def show(self, view: View) -> None: ...

    def close(self) -> None: ...


class Unseen:
    """A screen for those who wait without looking, for workers of others: logs once that none is there."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def show(self, view: View) -> None:
        sentence = nobody_serves(view.situation, start_a_worker)
        if sentence is not None and sentence not in self._told:
            self._told.add(sentence)
            log.warning("job %s waits: %s", view.report.job.public_id, sentence)

    def close(self) -> None: ...


class LineScreen:
    """Plain lines for logs: one every few seconds, and one at once for a reason to wait that was not told yet."""

    def __init__(self, console: Console, *, every_s: float = LINE_EVERY_S, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._every_s = every_s
        self._clock = clock
        self._due = 0.0
        self._told: set[str] = set()

    def show(self, view: View) -> None:
        reasons = {_without_numbers(reason) for reason in view.waits[:1]}
        if self._clock() < self._due and reasons <= self._told:
            return
        self._due = self._clock() + self._every_s
        self._told |= reasons
        self._console.print(as_line(view), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None: ...


def as_line(view: View) -> str:
    """One line of progress."""
    job, pace = view.report.job, view.pace
    parts = [
        f"{job.name} {job.public_id}: {rows_done(job, ' rows')}",
        *(f"{n:,} {s.value}" for s, n in view.report.by_status.items()),
        f"{rate(pace.rows_per_s)} rows/s",
        f"{rate(pace.tokens_per_s)} tok/s",
        money(view.report),
        f"{view.situation.in_flight:,} in flight",
    ]
    if pace.left_s is not None and job.loaded and job.done < job.n_rows:
        parts.append(f"{duration(pace.left_s)} left")
    if view.waits:
        parts.append(f"waits: {one_line(view.waits[0], 200)}")
    return " · ".join(parts)


def rows_done(job: JobRecord, unit: str = "") -> str:
    """How many rows have a final status; a share only of a total that is known."""
    of_total = "so far" if not job.loaded and not job.ended else f"({percent(job.done, job.n_rows)})"
    return f"{job.done:,} of {job.n_rows:,}{unit} {of_total}"


def money(report: JobReport) -> str:
    """What was spent, what may have been, what it will come to, and the budget."""
    text = f"{dollars(report.cost_nanousd)} spent" if report.cost_nanousd is not None else "cost unknown"
    if report.unknown_nanousd:
        text += f" + at most {dollars(report.unknown_nanousd)} unknown"
    if report.job.loaded and report.job.done < report.job.n_rows and report.projected_nanousd:
        text += f", about {dollars(report.projected_nanousd)} in all"
    if report.job.budget_nanousd is not None:
        text += f", budget {dollars(report.job.budget_nanousd)}"
    return text


@dataclass(kw_only=True)
class Follower:
    """Waits for one job. ``unfit`` answers why workers that this process runs could not start."""

    database: Database
    job_id: int
    screen: Screen = field(default_factory=Silent)
    remedy: Remedy = start_a_worker
    unfit: Callable[[], Sequence[str]] = tuple
    every_s: float = 0.25
    patience_s: float = math.inf  # how long a job may be without a live worker
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _meter: PaceMeter = field(default_factory=PaceMeter)
    _last: View | None = None
    _unserved_since: float | None = None

    def wait(self, *, timeout_s: float | None = None) -> JobReport:
        """Shows the job until it is done; answers its report.

        Raises JobStopped when it is paused, cancelled, failed to load, or has no worker and none to come; TimeoutError
        when time is up. The job itself is left as it is.
        """
        deadline = None if timeout_s is None else self.clock() + timeout_s
        try:
            while True:
                situation = self._look()
                if situation is not None and situation.report.job.state is JobState.DONE:
                    return situation.report
                if situation is not None and situation.nothing_left():
                    self._close_job()
                if situation is not None and (reason := self._stopped(situation)) is not None:
                    raise JobStopped(reason)
                if deadline is not None and self.clock() >= deadline:
                    raise TimeoutError(f"the job is not done after {duration(timeout_s)}; it goes on without you")
                self.sleep(self.every_s)
        finally:
            self.screen.close()

    def show_until(self, ended: threading.Event) -> None:
        """Shows the job until somebody says that it is enough; for a thread beside one that loads the job."""
        try:
            while not ended.wait(self.every_s):
                with contextlib.suppress(BatchmillError):  # whoever loads or waits for the job finds out, and says so
                    self._look()
        finally:
            self.screen.close()

    def _look(self) -> Situation | None:
        """Reads and shows the job; None when the database does not answer just now."""
        try:
            situation = read_situation(self.database, self.job_id, patience_s=_DATABASE_PATIENCE_S)
        except DatabaseUnavailable as fault:
            if self._last is None:
                raise
            self.screen.show(replace(self._last, waits=(str(fault),)))
            return None
        job = situation.report.job
        idle = situation.in_flight == 0
        pace = self._meter.add(self.clock(), done=job.done, tokens=job.usage.total, rows=job.n_rows, idle=idle)
        waits = why_waiting(situation, remedy=self.remedy, now_ms=int(time.time() * 1000))
        self._last = View(situation=situation, pace=pace, waits=waits)
        self.screen.show(self._last)
        return situation

    def _close_job(self) -> None:
        """Workers close jobs; here the one that had the last row ended before it did, and no other may ever come."""
        with contextlib.suppress(DatabaseUnavailable):  # tried again at the next look
            self.database.run(steering.finish, patience_s=_DATABASE_PATIENCE_S)

    def _stopped(self, situation: Situation) -> str | None:
        reason = stopped_because(situation)
        unserved = None if reason is not None else nobody_serves(situation, self.remedy)
        if unserved is None:
            self._unserved_since = None
            return reason
        if unfit := self.unfit():
            return f"no worker could start: {'; '.join(unfit)}"
        if self._unserved_since is None:
            self._unserved_since = self.clock()
        return unserved if self.clock() - self._unserved_since >= self.patience_s else None


def _without_numbers(text: str) -> str:
    return "".join(c for c in text if not c.isdigit())
