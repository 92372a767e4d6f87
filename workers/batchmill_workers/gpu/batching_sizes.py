"""How much fits on a device at once, found by trying: grown while that helps, halved when memory ran out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchmill_workers.gpu.batching import Batch, Item

_HELPS = 1.05  # a larger batch must be so much faster per row-token to be kept
_RUNS = 2  # full batches that are measured before the next step
_REST_BATCHES = 64  # full batches between two tries to grow beyond what failed or did not help; doubles each time
_LONGEST_REST = 4096
_DEFAULT_ROWS = 8
_DEFAULT_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """What becomes of a batch that did not fit: batches to run instead, or the one row that is too long."""

    again: tuple[Batch, ...] = ()
    too_long: Item | None = None


@dataclass(slots=True)
class _Class:
    """What is known of one length class, in row-tokens (rows x padded length)."""

    budget: int
    proven: int = 0  # the most that ran
    ceiling: int | None = None  # the least that failed
    before: tuple[int, float] | None = None  # the budget that this one is measured against, and its row-tokens/s
    tokens: int = 0
    seconds: float = 0.0
    runs: int = 0
    settled: bool = False  # the size is found; larger ones are tried rarely
    rest: int = 0
    next_rest: int = _REST_BATCHES


class Sizes:
    """Budgets in row-tokens by length class. Deterministic, without a clock and without a lock: `Batcher` holds one.

    ``row_tokens`` is the first guess of what fits, such as free memory / bytes that a token of a row takes up.
    ``most_row_tokens`` bounds growth. What is told of one class is the first guess for its neighbours.
    """

    def __init__(self, *, row_tokens: int | None = None, most_row_tokens: int | None = None) -> None:
        self._guess = max(1, row_tokens or _DEFAULT_ROWS * _DEFAULT_LENGTH)
        self._most = most_row_tokens
        self._classes: dict[int, _Class] = {}

    def budget(self, length_class: int) -> int:
        """Row-tokens that a batch of this class may take up. One row may always run."""
        known = self._classes.get(length_class)
        return self._first(length_class) if known is None else known.budget

    def ran(self, batch: Batch, seconds: float, computed: int | None = None) -> None:
        """A batch ran. The next may be larger when full ones still gain by it.

        ``computed`` are the row-tokens that were computed, where answers ended before their longest possible length.
        """
        state = self._class(batch.length_class)
        state.proven = max(state.proven, batch.row_tokens)
        state.budget = max(state.budget, batch.padded)  # one row may always run: larger means two
        if batch.row_tokens + batch.padded <= state.budget or seconds <= 0:
            return  # not full: it says nothing about the size
        if state.rest > 0:
            state.rest -= 1
            return
        state.tokens += batch.row_tokens if computed is None else computed
        state.seconds += seconds
        state.runs += 1
        if state.runs >= _RUNS:
            self._step(state)

    def out_of_memory(self, batch: Batch) -> Halves:
        """A batch did not fit: its class shrinks, and its halves are to be run instead.

        One row alone is tried once more, since what ran before it may have held memory; then it is too long.
        """
        state = self._class(batch.length_class)
        if batch.rows > 1:
            self._shrink(state, batch.row_tokens)
            half = batch.rows // 2
            return Halves(again=(Batch(items=batch.items[:half]), Batch(items=batch.items[half:])))
        if not batch.last_try:
            return Halves(again=(Batch(items=batch.items, last_try=True),))
        return Halves(too_long=batch.items[0])

    def learned(self) -> dict[int, int]:
        """Rows of the full length of each class that surely fit, for classes that were tried."""
        return {
            c: max(1, min(state.proven, state.budget) >> c)
            for c, state in sorted(self._classes.items())
            if state.proven
        }

    def use(self, rows: Mapping[int, int]) -> None:
        """Starts from what was learned before. It is tried again whether more fits, but not at once."""
        for c, n in rows.items():
            if n > 0 and 0 <= c < 64:
                self._classes[c] = _Class(budget=self._bounded(n << c), proven=n << c, settled=True, rest=_REST_BATCHES)

    def _class(self, length_class: int) -> _Class:
        if length_class not in self._classes:
            self._classes[length_class] = _Class(budget=self._first(length_class))
        return self._classes[length_class]

    def _first(self, length_class: int) -> int:
        nearest = min(self._classes, key=lambda c: (abs(c - length_class), c), default=None)
        return self._bounded(self._guess if nearest is None else self._classes[nearest].budget)

    def _bounded(self, row_tokens: int) -> int:
        return row_tokens if self._most is None else max(1, min(row_tokens, self._most))

    def _step(self, state: _Class) -> None:
        rate = state.tokens / state.seconds
        if state.before is not None and rate < state.before[1] * _HELPS:
            state.budget = state.before[0]
            self._settle(state)
            return
        if state.before is not None and state.settled:  # what failed before fits by now
            state.settled, state.ceiling = False, None
        larger = self._larger(state)
        if larger is None:
            self._settle(state)
            return
        self._measure_anew(state)
        state.before = (state.budget, rate)
        state.budget = larger

    def _larger(self, state: _Class) -> int | None:
        """The next size to try: twice as much; between what works and what failed; in the end what failed, once more."""
        if state.ceiling is None:
            larger = 2 * state.budget
        elif state.settled:
            larger = max(state.ceiling, state.budget)
        else:
            larger = (state.budget + state.ceiling) // 2
        larger = self._bounded(larger)
        return larger if larger >= state.budget + state.budget // 8 + 1 else None

    def _shrink(self, state: _Class, failed: int) -> None:
        state.ceiling = failed if state.ceiling is None else min(state.ceiling, failed)
        if state.proven >= failed:  # it fitted once: there is less memory now, or it lies in pieces
            state.proven, state.settled = 0, False
        state.budget = max(1, min(state.budget, max(failed // 2, state.proven)))
        self._measure_anew(state)
        if state.settled:
            self._settle(state)

    def _settle(self, state: _Class) -> None:
        state.settled = True
        state.rest = state.next_rest
        state.next_rest = min(_LONGEST_REST, 2 * state.next_rest)
        self._measure_anew(state)

    def _measure_anew(self, state: _Class) -> None:
        state.before = None
        state.tokens, state.seconds, state.runs = 0, 0.0, 0
