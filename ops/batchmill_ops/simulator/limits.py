"""Request and token limits as OpenAI-compatible providers enforce and announce them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OverLimit:
    """A call over a limit: ``name`` of the limit (``requests`` or ``tokens``) and how long until it would fit."""

    name: str
    limit: int
    used: int
    asked: int
    wait_s: float

    @property
    def message(self) -> str:
        initials = "RPM" if self.name == "requests" else "TPM"
        if self.asked > self.limit:
            head, tail = "Request too large", "The input or output tokens must be reduced in order to run successfully."
        else:
            head, tail = "Rate limit reached", f"Please try again in {go_duration(self.wait_s)}."
        used = f"Limit {self.limit}, Used {self.used}, Requested {self.asked}"
        return f"{head} for {self.name} per min ({initials}): {used}. {tail}"


class TokenBucket:
    """A bucket that holds one minute's worth and refills evenly. The clock is a parameter, in seconds."""

    def __init__(self, name: str, per_minute: int) -> None:
        self.name = name
        self.limit = per_minute
        self._level = float(per_minute)
        self._filled_at_s = -math.inf

    def refill(self, now_s: float) -> None:
        if now_s > self._filled_at_s:
            gained = (now_s - self._filled_at_s) * self.limit / 60
            self._level = min(float(self.limit), self._level + gained)
            self._filled_at_s = now_s

    def over_limit(self, amount: int) -> OverLimit | None:
        """Why ``amount`` cannot be taken now, or None. One that never fits is told to wait for a full bucket."""
        if amount <= self._level + 1e-9:
            return None
        missing = min(amount, self.limit) - self._level
        wait_s = max(0.0, missing) * 60 / self.limit
        return OverLimit(
            name=self.name, limit=self.limit, used=self.limit - self.remaining, asked=amount, wait_s=wait_s
        )

    def take(self, amount: int) -> None:
        self._level -= amount

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self._level + 1e-9))

    def headers(self) -> str:
        """The limit, what is left and when the bucket is full again, as header lines."""
        reset = go_duration((self.limit - self._level) * 60 / self.limit)
        return (
            f"x-ratelimit-limit-{self.name}: {self.limit}\r\nx-ratelimit-remaining-{self.name}: {self.remaining}\r\n"
            f"x-ratelimit-reset-{self.name}: {reset}\r\n"
        )


class RateLimits:
    """All limits of the simulated account: a call passes all buckets or takes from none."""

    def __init__(self, *, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        limits = (("requests", requests_per_minute), ("tokens", tokens_per_minute))
        self._buckets = [TokenBucket(name, limit) for name, limit in limits if limit is not None]

    def admit(self, *, tokens: int, now_s: float) -> OverLimit | None:
        """Takes one request and its tokens, or says which limit refused them."""
        if not self._buckets:
            return None
        asked = [(bucket, 1 if bucket.name == "requests" else tokens) for bucket in self._buckets]
        for bucket, _ in asked:
            bucket.refill(now_s)
        over = [over_limit for bucket, amount in asked if (over_limit := bucket.over_limit(amount))]
        if over:
            return max(over, key=lambda over_limit: over_limit.wait_s)
        for bucket, amount in asked:
            bucket.take(amount)
        return None

    def headers(self) -> str:
        if not self._buckets:
            return ""
        return "".join(bucket.headers() for bucket in self._buckets)


def retry_after_headers(wait_s: float) -> str:
    """``retry-after`` in whole seconds and ``retry-after-ms``, both rounded up so that the wait suffices."""
    return f"retry-after: {math.ceil(wait_s)}\r\nretry-after-ms: {math.ceil(wait_s * 1000)}\r\n"


def go_duration(seconds: float) -> str:
    """``350ms``, ``1.5s`` or ``6m0s``: Go's ``time.Duration.String``, to the millisecond, rounded up."""
    ms = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    text = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if not minutes:
        return text
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{text}" if hours else f"{minutes}m{text}"
