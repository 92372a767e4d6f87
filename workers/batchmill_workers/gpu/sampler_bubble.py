"""Bubble time: how long a device stood idle while rows waited for it, added up at every event that bears on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BubbleMeter:
    """The integral of [the device computes nothing] x [rows wait for it] over time, in nanoseconds.

    *Nothing computed*: the engine's ``busy_ns`` does not grow. It is a cumulative figure, so its difference between two
    events is exact however often the device fell idle in between; no event of the engine's own is needed.

    *Rows wait*: this worker holds an attempt of a chunk (from its claim to its release: while nothing runs, whatever it
    has left is rows that are read, booked, queued or retried, or the last save), or SQL has a ready chunk on the queue
    that is due. What SQL has is known by ``look``, while no attempt is held: the answer counts until the next look. The
    time between the end of the last attempt and the first look after it counts if that look finds work, or if a claim
    comes before it.

    Safe to call from any thread. ``clock`` and ``busy_ns`` are in nanoseconds.
    """

    def __init__(self, busy_ns: Callable[[], int], *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._busy_ns = busy_ns
        self._clock = clock
        self._lock = threading.Lock()
        self._at_ns = clock()
        self._busy_at_ns = busy_ns()
        self._held = 0
        self._ready: bool | None = False  # None: nobody has looked since the last attempt ended
        self._undecided_ns = 0
        self._bubble_ns = 0

    @property
    def needs_look(self) -> bool:
        """Whether only SQL knows if rows wait."""
        return self._held == 0

    @property
    def bubble_ns(self) -> int:
        """Up to now. Never falls."""
        with self._lock:
            self._advance()
            return self._bubble_ns

    @contextmanager
    def holding(self) -> Iterator[None]:
        """An attempt of a chunk is held for the length of the block."""
        self._hold(1)
        try:
            yield
        finally:
            self._hold(-1)

    def look(self, ready: bool) -> None:
        """Says whether SQL has a chunk that is ready and due for this engine."""
        with self._lock:
            self._advance()
            if self._held == 0:
                self._decide(ready)
                self._ready = ready

    def _hold(self, change: int) -> None:
        with self._lock:
            self._advance()
            self._decide(True)
            self._held += change
            self._ready = None

    def _decide(self, waited: bool) -> None:
        self._bubble_ns += self._undecided_ns if waited else 0
        self._undecided_ns = 0

    def _advance(self) -> None:
        now_ns, busy_ns = self._clock(), self._busy_ns()
        idle_ns = max(0, now_ns - self._at_ns - max(0, busy_ns - self._busy_at_ns))
        self._at_ns, self._busy_at_ns = now_ns, busy_ns
        if self._held or self._ready:
            self._bubble_ns += idle_ns
        elif self._ready is None:
            self._undecided_ns += idle_ns
