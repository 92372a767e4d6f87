"""What a save adds to its chunk's counters: rows by status, calls, tokens and money."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from batchmill_core.errors import CallState

from .ledger import CallEnd, Move
from .schema import COUNTER_COLUMNS

if TYPE_CHECKING:
    from .results import NewResult


def gains_of(results: Iterable[NewResult], moves: Sequence[Move]) -> dict[str, int]:
    """By counter; a row that replaces an earlier round's result is taken from that one's status."""
    gains = dict.fromkeys(COUNTER_COLUMNS, 0)
    for r in results:
        gains[f"n_{r.status.value}"] += 1
        if r.replaces is not None:
            gains[f"n_{r.replaces.value}"] -= 1
    for move in moves:
        if move.before is CallState.UNKNOWN:  # it was counted when its attempt was given up
            _count_unknown(gains, move, -1)
        if move.end.state is CallState.UNKNOWN:
            _count_unknown(gains, move, 1)
        elif move.end.state is CallState.SETTLED:
            _count_settled(gains, move.end)
    return gains


def _count_unknown(gains: dict[str, int], move: Move, by: int) -> None:
    gains["calls"] += by
    gains["unknown_calls"] += by
    gains["unknown_nanousd"] += by * (move.bound_nanousd or 0)


def _count_settled(gains: dict[str, int], end: CallEnd) -> None:
    gains["calls"] += 1
    cost = end.cost_nanousd
    if cost is None:
        gains["unknown_calls"] += 1
    else:
        gains["cost_nanousd"] += cost
        gains["wasted_nanousd"] += cost if end.wasted else 0
    if (u := end.usage) is not None:
        gains["input_tokens"] += u.input
        gains["cached_input_tokens"] += u.cached_input
        gains["cache_write_tokens"] += u.cache_write
        gains["output_tokens"] += u.output
        gains["reasoning_tokens"] += u.reasoning
