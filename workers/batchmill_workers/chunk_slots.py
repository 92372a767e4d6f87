"""How many chunks a process works on at a time, whoever starts them: a message, or the dispatcher by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ChunkSlots:
    """So many slots and no more. Each is taken by a thread, and given back by whoever works in it.

    A chunk whose rows are all on their way needs its place no longer and lends it to the next one, so that an engine
    that takes many rows at once is kept full by small chunks too, also while the last rows of a chunk are awaited. At
    most ``most`` chunks are then worked on (None: ``count``, nothing is lent). ``on_size`` is told whenever how many may
    be taken has changed.
    """

    def __init__(self, count: int, *, most: int | None = None, on_size: Callable[[int], None] | None = None) -> None:
        self._count = count
        self._most = max(count, most or count)
        self._on_size = on_size
        self._lent = 0
        self._busy = 0
        self._changed = threading.Condition()

    @property
    def busy(self) -> int:
        return self._busy

    @property
    def size(self) -> int:
        """How many chunks may be worked on just now."""
        return min(self._most, self._count + self._lent)

    def lend(self) -> bool:
        """A chunk needs its place no longer; answers whether that makes room for another.

        It gives the slot back when it ends, and ends the loan before that.
        """
        return self._borrow(1)

    def end_loan(self) -> None:
        self._borrow(-1)

    def _borrow(self, count: int) -> bool:
        with self._changed:
            before = self.size
            self._lent += count
            size = self.size
            self._changed.notify_all()
        if size != before and self._on_size is not None:
            self._on_size(size)
        return size != before

    def take(self) -> None:
        """Waits until a slot is free and takes it."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self.size)
            self._busy += 1

    def try_take(self) -> bool:
        """Takes a slot if one is free: checked and taken in one step, so that no two callers get the last one."""
        with self._changed:
            if self._busy >= self.size:
                return False
            self._busy += 1
            return True

    def give(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Waits until none is busy; False when some still are after ``timeout_s`` (None: waits as long as it takes)."""
        with self._changed:
            return self._changed.wait_for(lambda: self._busy == 0, timeout_s)
