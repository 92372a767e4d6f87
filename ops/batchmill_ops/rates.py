"""Rates over the last seconds, and the time that is left at such a rate."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Rows and tokens per second over the recent window, and seconds left; None where nothing is known yet."""

    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None


class PaceMeter:
    """Keeps samples of the last ten seconds; the clock is given with each sample."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, at_s: float, *, done: int, tokens: int, rows: int, idle: bool = False) -> Pace:
        """Notes how far the job is at ``at_s`` and answers its pace. ``rows`` is how many there are in all.

        ``idle``: nothing is in flight. Time before the first call, while workers start, is no part of the pace.
        """
        samples = self._samples
        not_begun = idle and len(samples) == 1 and done == samples[0][1]
        if not_begun or (samples and done < samples[-1][1]):  # a retry took rows back
            samples.clear()
        self._samples.append((at_s, done, tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= at_s - self._window_s:
            self._samples.popleft()
        first_s, first_done, first_tokens = self._samples[0]
        span_s = at_s - first_s
        if span_s <= 0:
            return Pace()
        rows_per_s = (done - first_done) / span_s
        left = rows - done
        return Pace(
            rows_per_s=rows_per_s,
            tokens_per_s=(tokens - first_tokens) / span_s,
            left_s=0.0 if left <= 0 else (left / rows_per_s if rows_per_s else None),
        )
