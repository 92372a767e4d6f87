"""The dynamic batcher: one thread reads and tokenises rows and puts them in, another takes batches and computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from batchmill_workers.gpu.batching import Batch, Item, Limits
from batchmill_workers.gpu.batching_sizes import Sizes
from batchmill_workers.gpu.batching_waiting import WaitingRows

_NS_PER_S = 1_000_000_000


class Batcher:
    """Safe to call from any threads, but only one may take: the one that computes.

    The reader::

        with batcher.reading(len(frames)):      # no batch goes early while requests are still being tokenised
            for frame in frames:
                batcher.put(Item(...))

    The computing thread::

        while not batcher.closed:
            batch = batcher.take()              # None: closed, or the timeout passed
            try:
                ... run it ...
            except BaseException as error:
                if is_sticky(error): ...            # see batching_faults
                if not is_out_of_memory(error): failed = batcher.failed(batch, answered)  # its halves come by take()
                # after freeing what the failed batch held: gc.collect(), torch.cuda.empty_cache()
                too_long = batcher.out_of_memory(batch, answered)   # its halves come by take()
            else:
                batcher.ran(batch, seconds)
    """

    def __init__(self, limits: Limits, sizes: Sizes | None = None) -> None:
        self._sizes = sizes if sizes is not None else Sizes()
        self._waiting = WaitingRows(limits, self._sizes)
        self._changed = threading.Condition()
        self._closed = False
        self._running: set[int] = set()
        self._abandoned: set[int] = set()
        self._gone_ns = 0  # when the last batch was taken
        self._last_batch_ns: int | None = None
        self._bubble_ns = 0
        self._batch_rows: float | None = None

    # the reader's side

    def put(self, item: Item) -> None:
        """A row arrives. Raises ValueError for a number that waits already."""
        with self._changed:
            self._waiting.put(item)
            self._changed.notify()

    @contextmanager
    def reading(self, requests: int) -> Iterator[None]:
        """Says that so many requests have come and are put when the block is left, or refused."""
        with self._changed:
            self._waiting.coming += requests
        try:
            yield
        finally:
            with self._changed:
                self._waiting.coming -= requests
                self._changed.notify()

    def cancel(self, number: int) -> bool:
        """Nobody waits for this row's answer any more. True if it was still waiting.

        One that runs is left out should its batch come again in halves.
        """
        with self._changed:
            waited = self._waiting.remove(number)
            if not waited and number in self._running:
                self._abandoned.add(number)
            return waited

    def close(self) -> None:
        """`take` returns None from now on. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # the computing thread's side

    def take(self, timeout_s: float | None = None) -> Batch | None:
        """Waits until a batch is due, see `WaitingRows`. None: closed, or nothing was due within the timeout.

        With 0 it never waits: for a device that has room beside what it computes already. Rows that came just now may
        then stay until it asks again, so that those that follow them go along.
        """
        came_ns = time.monotonic_ns()
        until_ns = None if timeout_s is None else came_ns + int(timeout_s * _NS_PER_S)
        free_ns = came_ns if timeout_s != 0 else 0
        with self._changed:
            while not self._closed:
                now_ns = time.monotonic_ns()
                oldest_ns = self._waiting.oldest_ns
                due = self._waiting.next(now_ns, free_ns, self._last_batch_ns)
                if isinstance(due, Batch) or (until_ns is not None and now_ns >= until_ns):
                    if oldest_ns is not None and timeout_s != 0:
                        self._bubble_ns += max(0, now_ns - max(came_ns, oldest_ns))
                    return self._go(due, now_ns) if isinstance(due, Batch) else None
                wake_ns = min((t for t in (due.until_ns, until_ns) if t is not None), default=None)
                self._changed.wait(None if wake_ns is None else max(0, wake_ns - now_ns) / _NS_PER_S)
            return None

    def ran(self, batch: Batch, seconds: float, computed: int | None = None) -> None:
        """The batch ran to its end in so many seconds of device time; ``computed`` as in `Sizes.ran`."""
        with self._changed:
            self._sizes.ran(batch, seconds, computed)
            self._ended(batch)

    def failed(self, batch: Batch, answered: Collection[int] = ()) -> Item | None:
        """The batch ended by an error that says nothing of its size, but may be the doing of one of its rows.

        Its halves come next by `take`, without the rows that were ``answered`` before. Returns the row that failed
        alone, which is the caller's to end.
        """
        with self._changed:
            gone = self._abandoned.union(answered)
            self._ended(batch)
            if batch.rows == 1:
                return None if batch.items[0].number in gone else batch.items[0]
            self._waiting.again([half for whole in batch.halves if (half := whole.without(gone)) is not None])
            return None

    def out_of_memory(self, batch: Batch, answered: Collection[int] = ()) -> Item | None:
        """The batch did not fit. Its halves come next by `take`, without the rows that were ``answered`` before.

        Returns the row that does not fit alone, which is the caller's to end as ``too_long``.
        """
        with self._changed:
            halves = self._sizes.out_of_memory(batch)
            gone = self._abandoned.union(answered)
            left = [half for whole in halves.again if (half := whole.without(gone)) is not None]
            self._waiting.again(left)
            self._ended(batch)
            return None if halves.too_long is None or halves.too_long.number in gone else halves.too_long

    # figures, for any thread

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """Rows that wait for the device."""
        with self._changed:
            return len(self._waiting)

    @property
    def bubble_ns(self) -> int:
        """Time in which the device was free while rows waited. Only ever grows."""
        return self._bubble_ns

    @property
    def batch_rows(self) -> float | None:
        """The mean size of the batches taken lately."""
        return self._batch_rows

    def use(self, rows: Mapping[int, int]) -> None:
        """Batch sizes that worked before, see `Tunable.use_batch_sizes`."""
        with self._changed:
            self._sizes.use(rows)

    def learned(self) -> dict[int, int]:
        """Batch sizes that work, see `Tunable.batch_sizes`."""
        with self._changed:
            return self._sizes.learned()

    def _go(self, batch: Batch, now_ns: int) -> Batch:
        self._running.update(item.number for item in batch.items)
        self._gone_ns = now_ns
        before = self._batch_rows
        self._batch_rows = float(batch.rows) if before is None else 0.8 * before + 0.2 * batch.rows
        return batch

    def _ended(self, batch: Batch) -> None:
        numbers = {item.number for item in batch.items}
        self._running -= numbers
        self._abandoned -= numbers
        self._last_batch_ns = time.monotonic_ns() - self._gone_ns
