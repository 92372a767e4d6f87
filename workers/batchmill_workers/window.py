"""How many rows a process has booked and not finished, per engine: in flight, plus a few booked ahead."""

from __future__ import annotations

import asyncio
from collections import deque


class Window:
    """A counting gate for the event loop, first come first served.

    Rows are booked a batch at a time before they wait for the quota, so that a commit's latency leaves no hole; what is
    booked ahead bounds how many calls a crash leaves `unknown` that were never sent.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    @classmethod
    def for_capacity(cls, in_flight: int) -> Window:
        return cls(in_flight + max(8, min(256, in_flight)))

    @property
    def batch(self) -> int:
        """How many rows are booked together."""
        return max(1, min(32, self.limit // 4))

    async def take(self, count: int) -> None:
        """Waits for room for ``count`` rows (at most `limit`). Cancellation takes nothing."""
        if not self._waiters and self.taken + count <= self.limit:
            self.taken += count
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((count, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(count)
            raise

    def give(self, count: int = 1) -> None:
        """Gives room back and lets the next ones in."""
        self.taken -= count
        while self._waiters:
            wanted, waiter = self._waiters[0]
            if waiter.done():  # cancelled
                self._waiters.popleft()
                continue
            if self.taken + wanted > self.limit:
                return
            self._waiters.popleft()
            self.taken += wanted
            waiter.set_result(None)
