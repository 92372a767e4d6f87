"""Loads a job while its data set is still being read: one thread reads, another saves what has come so far.

A source may give rows faster than they can be saved, or one a minute. So full chunks are saved as they come, and what
waits for company is saved after a second: a worker that could begin does not wait for the next row to be read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .chunking import PackedRow
from .loader import BYTES_PER_TRANSACTION, ROWS_PER_TRANSACTION, Loader

_PATIENCE_S = 1.0


def load_eagerly(loader: Loader, rows: Iterable[PackedRow]) -> None:
    """Reads in this thread, which the source may be bound to. What was read before a fault is saved before it is raised.

    Raises as `Loader.load` does.
    """
    intake = Intake()
    saver = threading.Thread(target=_save_all, args=(loader, intake), name="loader", daemon=True)
    saver.start()
    try:
        for row in rows:
            intake.put(row)
        intake.end(whole=True)
    finally:
        intake.end(whole=False)
        saver.join()
    intake.check()


def _save_all(loader: Loader, intake: Intake) -> None:
    try:
        while not intake.ended:
            taken = intake.take(loader.chunk_size)
            loader.add(taken, save_all=len(taken) < loader.chunk_size)
        if intake.whole:
            loader.end()
        else:
            loader.save(save_all=True)
    except BaseException as fault:  # noqa: BLE001  # raised in the thread that reads
        intake.fail(fault)


class Intake:
    """Rows on their way from the thread that reads to the one that saves; bounded, so that memory stays flat."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._rows: list[PackedRow] = []
        self._size = 0
        self._closed = False
        self._fault: BaseException | None = None
        self.whole = False  # the source was read to its end

    @property
    def ended(self) -> bool:
        """Whether no row is left and none will come."""
        with self._moved:
            return self._closed and not self._rows

    def put(self, row: PackedRow) -> None:
        """Waits while too much is waiting to be saved. Raises what the saving thread raised."""
        with self._moved:
            self._moved.wait_for(lambda: self._fault is not None or self._has_room())
            self.check()
            self._rows.append(row)
            self._size += row.n_bytes
            self._moved.notify_all()

    def take(self, wanted: int) -> list[PackedRow]:
        """What has come: at least ``wanted`` rows, or fewer when they take long or are the last."""
        with self._moved:
            self._moved.wait_for(
                lambda: self._closed or len(self._rows) >= wanted or not self._has_room(), timeout=_PATIENCE_S
            )
            taken, self._rows, self._size = self._rows, [], 0
            self._moved.notify_all()
            return taken

    def end(self, *, whole: bool) -> None:
        """No more rows come; ``whole`` when the source was read to its end. The first word counts."""
        with self._moved:
            if not self._closed:
                self._closed, self.whole = True, whole
            self._moved.notify_all()

    def fail(self, fault: BaseException) -> None:
        """Saving failed: whoever reads is told."""
        with self._moved:
            self._fault = fault
            self._moved.notify_all()

    def check(self) -> None:
        """Raises what the saving thread raised."""
        if self._fault is not None:
            raise self._fault

    def _has_room(self) -> bool:
        return len(self._rows) < ROWS_PER_TRANSACTION and self._size < BYTES_PER_TRANSACTION
