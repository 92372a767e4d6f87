"""A worker is killed at each place of a row's way; another takes over, and nothing is lost, doubled or uncounted."""

from __future__ import annotations

from collections import Counter

import pytest

from batchmill_ops.simulator import SimulatorConfig
from batchmill_workers.failpoints import FAILPOINTS, VARIABLE
from tests.integration.conftest import MakeMill

KILLED = -9
ROWS = 100  # four chunks
PASSES = {"after_call": 40, "before_commit": 2, "after_commit": 2, "after_claim": 2, "after_reserve": 3}


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_worker_killed_anywhere_loses_no_row_and_repeats_no_saved_one(name: str, make_mill: MakeMill) -> None:
    # Few rows in flight, so that they come in many commits, however slow those are.
    mill = make_mill(
        settings={"lease_s": 1.5},
        provider=SimulatorConfig(latency_s=0.05, latency_jitter=0.5),
        account={"max_in_flight": 8},
    )
    victim = mill.start_worker("victim", env={VARIABLE: f"{name}:{PASSES.get(name, 1)}"})
    with mill.leading():
        job = mill.submit(ROWS)
        exit_code = victim.wait_dead()
        saved = mill.saved(job)
        sent = len(mill.bill())
        mill.start_worker("heir", ready=False)
        mill.wait_done(job)

    assert exit_code == KILLED
    done = mill.invariants(job)
    assert done.done == ROWS
    bill = mill.bill()
    again = {line.row for line in bill[sent:]} & saved
    assert not again, f"rows that were called again after their result was saved: {sorted(again)}"
    calls = Counter(line.row for line in bill)
    assert all(calls[row] == 1 for row in saved)
