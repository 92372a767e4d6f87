"""The device time of one call among many: the integral of dt/n over the call, n being the calls running."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction


class DeviceMeter:
    """Splits the device's busy time over the calls that ran, each moment in equal parts.

    One running integral serves all calls, so that an event costs O(1) whatever the number of calls. It is an exact
    fraction (its denominator divides the least common multiple of the numbers of calls seen), and what rounding to
    whole nanoseconds leaves over is carried to the next call that ends: whenever no call runs, the shares handed out
    sum exactly to ``busy_ns``. Belongs to one event loop: it takes no lock.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._integral_at_start: dict[int, Fraction] = {}
        self._integral = Fraction(0)
        self._carry = Fraction(0)
        self._calls = 0
        self._last_ns = 0
        self.busy_ns = 0

    @property
    def running(self) -> int:
        return len(self._integral_at_start)

    @property
    def busy_so_far_ns(self) -> int:
        """``busy_ns`` up to now, for a reader on any thread: it changes nothing."""
        return self.busy_ns + (self._clock() - self._last_ns if self._integral_at_start else 0)

    def start(self) -> int:
        """A call begins to run; the token names it to ``stop``."""
        self._advance()
        self._calls += 1
        self._integral_at_start[self._calls] = self._integral
        return self._calls

    def stop(self, token: int) -> int:
        """A call ended: its share in nanoseconds. Raises KeyError for a call that is not running."""
        self._advance()
        exact = self._integral - self._integral_at_start.pop(token) + self._carry
        share_ns = round(exact)
        self._carry = exact - share_ns
        return share_ns

    def _advance(self) -> None:
        now_ns = self._clock()
        if self._integral_at_start:
            passed_ns = now_ns - self._last_ns
            self.busy_ns += passed_ns
            self._integral += Fraction(passed_ns, self.running)
        self._last_ns = now_ns
