"""Seeing a job through from a terminal: workers where they are embedded, progress, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rich.status import Status

from batchmill_core.errors import BatchmillError, JobStopped
from batchmill_core.settings import Settings
from batchmill_db import chunks
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Database
from batchmill_ops.live_screen import screen_for
from batchmill_ops.progress import LINE_EVERY_S, OWN_PATIENCE_S, Follower
from batchmill_ops.report import JobReport
from batchmill_ops.waits import start_a_worker, wait_for_own

from .control import pause
from .terminal import say, talk

if TYPE_CHECKING:
    from batchmill_ops.stack import Stack


@contextlib.contextmanager
def attached(settings: Settings) -> Iterator[Stack]:
    """The broker and database of these settings, embedded ones running, for the length of a ``with`` block.

    An embedded stack drains at the end, if nobody else uses it; an interrupt meanwhile ends it at once.
    """
    from batchmill_ops.stack import attach

    with _terminable():
        stack = attach(settings)
        try:
            yield stack
        finally:
            _leave(stack)


def _leave(stack: Stack) -> None:
    """Drains what nobody else uses; an interrupt meanwhile ends it at once. What was raised before goes on."""
    try:
        stack.stop()
    except KeyboardInterrupt:
        say("stopping at once; calls in flight are lost, their cost is booked as unknown")
        stack.kill()


def see_through(
    stack: Stack, settings: Settings, job_id: int, public_id: str, *, patience_s: float | None = None
) -> JobReport:
    """Serves a job where workers are embedded, and shows it until it is done.

    Ctrl-C (and SIGTERM) pauses it. Raises JobStopped when it is paused or cannot go on, or was without a live worker for
    ``patience_s``; workers of others are waited for as long as it takes if it is None.
    """
    follower = _follower(stack, settings, job_id, patience_s)
    try:
        stack.serve(queues_of(stack.database, job_id))
        return follower.wait()
    except KeyboardInterrupt:
        raise JobStopped(_paused(stack.database, job_id, public_id, settings)) from None
    except JobStopped as stop:
        if not (settings.embedded and stack.unfit()):
            raise
        raise JobStopped(_set_aside(stack.database, job_id, public_id, str(stop))) from None


def _follower(stack: Stack, settings: Settings, job_id: int, patience_s: float | None = None) -> Follower:
    return Follower(
        database=stack.database,
        job_id=job_id,
        screen=screen_for(talk()),
        remedy=wait_for_own if settings.embedded else start_a_worker,
        unfit=stack.unfit,
        patience_s=patience_without(settings) if patience_s is None else patience_s,
    )


def patience_without(settings: Settings) -> float:
    """How long in seconds a job is waited for that has no live worker."""
    return OWN_PATIENCE_S if settings.embedded else math.inf


@contextlib.contextmanager
def shown_meanwhile(stack: Stack, settings: Settings) -> Iterator[Callable[[int], None]]:
    """Gives what serves and shows a job, by its number, from another thread, until the ``with`` block ends."""
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def show(job_id: int) -> None:
        stack.serve(queues_of(stack.database, job_id))
        follower = _follower(stack, settings, job_id)
        threads.append(threading.Thread(target=follower.show_until, args=(ended,), name="screen", daemon=True))
        threads[-1].start()

    try:
        yield show
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _set_aside(database: Database, job_id: int, public_id: str, reason: str) -> str:
    """Pauses a job that no worker can serve: left open, it would be ground and paid for beside the next one here."""
    with contextlib.suppress(BatchmillError):  # it ended just now: there is nothing left to pause
        if pause(database, job_id, reason=reason):
            return f"job {public_id} is paused: {reason}; then go on with: batchmill resume {public_id}"
    return reason


def _paused(database: Database, job_id: int, public_id: str, settings: Settings) -> str:
    with contextlib.suppress(BatchmillError):  # it ended just now: there is nothing left to pause
        pause(database, job_id, reason="interrupted at the terminal")
    if settings.embedded:
        say("pausing: calls in flight may finish; press Ctrl-C again to stop at once")
    return f"job {public_id} is paused, what was answered is saved; go on with: batchmill resume {public_id}"


def queues_of(database: Database, job_id: int) -> list[str]:
    """The queues with rows of this job to do."""
    return list(database.run(lambda conn: chunks.counts(conn, job_id)).queues)


@contextlib.contextmanager
def interruptible_loading(key: str | None) -> Iterator[Loading]:
    """Shows how a data set is read. Ctrl-C meanwhile raises JobStopped with what became of the job."""
    try:
        with Loading() as loading:
            yield loading
    except KeyboardInterrupt:
        raise JobStopped(_interrupted(loading.opened, key)) from None


def _interrupted(opened: JobRecord | None, key: str | None) -> str:
    if opened is not None:
        return (
            f"interrupted while the data set was read: job {opened.public_id} is paused, what was answered is saved; "
            f"run the same command with --key {opened.key}: it goes on from there"
        )
    kept = "the job is dropped" if key is None else f"what was read is kept under the key {key}"
    return f"interrupted while the data set was read: nothing was asked, {kept}; run the same command again"


class Loading:
    """Says how far a data set is read: a spinner on a terminal, else a line every few seconds.

    ``opened`` is the job once workers may begin with it.
    """

    def __init__(self) -> None:
        self._console = talk()
        self._due = time.monotonic() + LINE_EVERY_S
        self._status: Status | None = None
        self._is_quiet = False
        self.opened: JobRecord | None = None

    def __call__(self, rows: int) -> None:
        if self._is_quiet:
            return
        text = f"reading the data set: {rows:,} rows saved"
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY_S
            say(text)

    def be_quiet(self) -> None:
        """From now on something else shows the job."""
        self._is_quiet = True
        self.__exit__()

    def __enter__(self) -> Loading:
        if self._console.is_terminal:
            self._status = self._console.status("reading the data set")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        status, self._status = self._status, None
        if status is not None:
            status.stop()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM means here what Ctrl-C means."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
