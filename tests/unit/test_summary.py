"""What came of an attempt, in words for Flower."""

from __future__ import annotations

import pytest

from batchmill_core.errors import CallState
from batchmill_core.usage import Usage
from batchmill_db.ledger import CallEnd
from batchmill_workers.summary import Tally


@pytest.mark.parametrize(
    ("cost_nanousd", "shown"),
    [
        (4_100_000, "12 tok · $0.0041 · "),
        (820, "12 tok · $0.00000082 · "),
        (0, "12 tok · $0 · "),
        (None, "12 tok · 0 rows/s"),
    ],
)
def test_a_small_cost_is_not_told_as_zero_and_an_unknown_one_not_at_all(cost_nanousd: int | None, shown: str) -> None:
    tally = Tally()
    tally.count([], [CallEnd(seq=1, state=CallState.SETTLED, usage=Usage(input=12), cost_nanousd=cost_nanousd)])

    assert shown in tally.words(handed_back=0, reason="")
