"""A rate limit as one number: the generic cell rate algorithm, for requests and for tokens alike."""

from __future__ import annotations

from batchmill_core.catalog import Limits

_ROUNDING_S = 1e-9  # sums of floats; far below what a clock or a provider can tell


class Bucket:
    """Lets ``per_s`` units pass each second, and up to ``burst`` of them at once after a quiet time.

    In any span of ``s`` seconds at most ``burst + s * per_s`` units pass; a single take larger than the burst passes
    when all earlier ones are paid off. Times are seconds of any one clock. Source: GCRA, ITU-T I.371, virtual scheduling.
    """

    __slots__ = ("_burst_s", "_paid_until", "_unit_s", "queued")

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._unit_s = 1.0 / per_s
        self._burst_s = burst * self._unit_s
        self._paid_until = float("-inf")
        self.queued = 0.0  # units of those that wait in line

    def wait_s(self, units: float, *, now: float, behind: float = 0.0) -> float:
        """How long ``units`` must wait when ``behind`` units go first; 0.0 if they may pass now."""
        cost_s = units * self._unit_s
        due = max(self._paid_until, now) - now + behind * self._unit_s + cost_s
        wait = due - max(self._burst_s, cost_s)
        return wait if wait > _ROUNDING_S else 0.0

    def take(self, units: float, *, now: float) -> None:
        self._paid_until = max(self._paid_until, now) + units * self._unit_s

    def correct(self, units: float) -> None:
        """Charges (or with negative ``units`` gives back) the difference between an estimate and what was used."""
        self._paid_until += units * self._unit_s


class Allowance:
    """What an account or a model may use: requests and tokens, either of them perhaps without limit."""

    __slots__ = ("_requests", "_tokens", "unlimited")

    def __init__(self, limits: Limits) -> None:
        self._requests = _request_bucket(limits)
        self._tokens = _token_bucket(limits)
        self.unlimited = self._requests is None and self._tokens is None

    def wait_s(self, tokens: int, *, now: float, in_line: bool = False) -> float:
        """How long a request of ``tokens`` must wait; ``in_line``: behind all that are counted in line."""
        wait = 0.0
        if (requests := self._requests) is not None:
            wait = requests.wait_s(1, now=now, behind=requests.queued if in_line else 0.0)
        if (bucket := self._tokens) is not None:
            wait = max(wait, bucket.wait_s(tokens, now=now, behind=bucket.queued if in_line else 0.0))
        return wait

    def take(self, tokens: int, *, now: float) -> None:
        if self._requests is not None:
            self._requests.take(1, now=now)
        if self._tokens is not None:
            self._tokens.take(tokens, now=now)

    def correct(self, *, requests: int = 0, tokens: int = 0) -> None:
        """Charges, or gives back what is negative."""
        if self._requests is not None:
            self._requests.correct(requests)
        if self._tokens is not None:
            self._tokens.correct(tokens)

    def count_in_line(self, tokens: int, sign: int, *, requests: int = 1) -> None:
        """Counts requests of together ``tokens`` among those in line (sign 1), or no longer (sign -1)."""
        if self._requests is not None:
            self._requests.queued += sign * requests
        if self._tokens is not None:
            self._tokens.queued += sign * tokens


def _request_bucket(limits: Limits) -> Bucket | None:
    """Requests of an account or model; the burst is one second's worth and at least 1 unless the user set it."""
    per_s = limits.requests_per_second
    if per_s is None and limits.requests_per_minute is not None:
        per_s = limits.requests_per_minute / 60
    if per_s is None:
        return None
    return Bucket(per_s=per_s, burst=limits.burst if limits.burst is not None else max(1, int(per_s)))


def _token_bucket(limits: Limits) -> Bucket | None:
    """Tokens of an account or model; the burst is one second's worth, so that a minute holds what it says."""
    if limits.tokens_per_minute is None:
        return None
    per_s = limits.tokens_per_minute / 60
    return Bucket(per_s=per_s, burst=per_s)
