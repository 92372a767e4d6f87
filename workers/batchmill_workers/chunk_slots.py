"""How many chunks a process works on at a time, whoever starts them: a message, or the dispatcher by itself."""

from __future__ import annotations

import threading


class ChunkSlots:
    """So many slots and no more. Each is taken by a thread, and given back by whoever works in it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._busy = 0
        self._changed = threading.Condition()

    @property
    def busy(self) -> int:
        return self._busy

    def take(self) -> None:
        """Waits until a slot is free and takes it."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self._count)
            self._busy += 1

    def try_take(self) -> bool:
        """Takes a slot if one is free: checked and taken in one step, so that no two callers get the last one."""
        with self._changed:
            if self._busy >= self._count:
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
