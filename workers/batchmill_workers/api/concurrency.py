"""How many calls an account bears at once: adaptive, without I/O and without a clock."""

from __future__ import annotations

from batchmill_core.errors import CallError, CallTimeout, Overloaded, RateLimited, Unreachable

_LOSS = 0.5  # of a place, per call that met overload: when all of them do, the limit halves in one round trip
_CAREFUL_GAIN = 0.05  # of a place, per answered call
_QUICK_GAIN = 0.25  # the same, after two round trips in which nothing failed
_SLOW = 5.0  # times the usual latency; answers of different lengths stay below, queues at a provider do not
_SLOW_FACTOR = 0.9
_USUAL_GAIN = 0.05
_SIGNS_OF_OVERLOAD = (RateLimited, Overloaded, CallTimeout, Unreachable)


class AdaptiveLimit:
    """Calls in flight: starts at the maximum, shrinks with the share of calls that meet overload, grows with answers.

    It starts at the maximum because a healthy provider must be filled at once; one that is not says so within one
    round trip. A share of failures below a tenth, which no smaller limit would heal, does not shrink it; from 1 back
    to 256 takes about 25 round trips. ``limit`` is never below 1. Source: additive increase, multiplicative decrease
    (Chiu and Jain 1989), with the decrease in proportion to the share of failures (DCTCP, RFC 8257, 3.3).
    """

    __slots__ = ("_answered", "_clean", "_latency_sum_s", "_limit", "_slow", "_usual_s", "limit", "maximum")

    def __init__(self, maximum: int) -> None:
        self.maximum = max(1, maximum)
        self.limit = self.maximum
        self._limit = float(self.maximum)
        self._clean = 0  # answers since the last failure
        self._usual_s: float | None = None
        self._latency_sum_s = 0.0
        self._answered = 0
        self._slow = False

    def succeeded(self, *, latency_s: float, in_flight: int) -> None:
        """A call was answered after ``latency_s``, while ``in_flight`` calls (itself included) ran."""
        self._clean += 1
        self._latency_sum_s += latency_s
        self._answered += 1
        if self._answered >= max(self.limit, 16):
            self._judge_latency()
        if self._limit < self.maximum and not self._slow and 2 * in_flight >= self.limit:
            gain = _QUICK_GAIN if self._clean > 2 * self.limit else _CAREFUL_GAIN
            self._move_to(self._limit + max(gain, 1.0 / self._limit))

    def failed(self, error: CallError) -> None:
        """A call failed; only signs of overload count."""
        if isinstance(error, _SIGNS_OF_OVERLOAD):
            self._clean = 0
            self._move_to(self._limit - _LOSS)

    def _judge_latency(self) -> None:
        """Once per limit's worth of answers: much slower than usual means a queue there; yields, but keeps a quarter."""
        mean = self._latency_sum_s / self._answered
        self._latency_sum_s, self._answered = 0.0, 0
        usual = mean if self._usual_s is None else self._usual_s
        self._slow = mean > _SLOW * usual
        self._usual_s = mean if mean < usual else usual + _USUAL_GAIN * (mean - usual)
        if self._slow and self._limit > self.maximum / 4:
            self._move_to(self._limit * _SLOW_FACTOR)

    def _move_to(self, limit: float) -> None:
        self._limit = min(max(limit, 1.0), float(self.maximum))
        self.limit = int(self._limit)
