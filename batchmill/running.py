"""Seeing a job through from a terminal: workers where they are embedded, progress, and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rich.status import Status

from batchmill_core.errors import BatchmillError, JobStopped
from batchmill_core.settings import Settings
from batchmill_db import chunks
from batchmill_db.session import Database
from batchmill_ops.live_screen import screen_for
from batchmill_ops.progress import LINE_EVERY_S, OWN_PATIENCE_S, UNSERVED_PATIENCE_S, Follower
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


def see_through(stack: Stack, settings: Settings, job_id: int, public_id: str) -> JobReport:
    """Serves a job where workers are embedded, and shows it until it is done.

    Ctrl-C (and SIGTERM) pauses it. Raises JobStopped when it is paused or cannot go on.
    """
    follower = Follower(
        database=stack.database,
        job_id=job_id,
        screen=screen_for(talk()),
        remedy=wait_for_own if settings.embedded else start_a_worker,
        unfit=stack.unfit,
        patience_s=OWN_PATIENCE_S if settings.embedded else UNSERVED_PATIENCE_S,
    )
    try:
        stack.serve(queues_of(stack.database, job_id))
        return follower.wait()
    except KeyboardInterrupt:
        raise JobStopped(_paused(stack.database, job_id, public_id, settings)) from None
    except JobStopped as stop:
        if not (settings.embedded and stack.unfit()):
            raise
        raise JobStopped(_set_aside(stack.database, job_id, public_id, str(stop))) from None


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
        kept = "the job is dropped" if key is None else f"what was read is kept under the key {key}"
        raise JobStopped(
            f"interrupted while the data set was read: nothing was asked, {kept}; run the same command again"
        ) from None


class Loading:
    """Says how far a data set is read: a spinner on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        self._console = talk()
        self._due = time.monotonic() + LINE_EVERY_S
        self._status: Status | None = None

    def __call__(self, rows: int) -> None:
        text = f"reading the data set: {rows:,} rows saved"
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY_S
            say(text)

    def __enter__(self) -> Loading:
        if self._console.is_terminal:
            self._status = self._console.status("reading the data set")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


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
