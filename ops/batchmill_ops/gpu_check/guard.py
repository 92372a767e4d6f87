"""A bound on the whole check: a machine is lent for minutes, and an item that hangs must not take them from the others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ONCE_MORE_S = 20.0


class OutOfTime(Exception):
    """The time of the whole check is over."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread when the block takes longer, and again every 20 s until it ends."""

    def ring(_signal: int, _frame: Any) -> None:
        raise OutOfTime(f"the check may take {seconds:.0f} s (--most-seconds)")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, _ONCE_MORE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
