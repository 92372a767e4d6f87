"""SIGTERM: what is finished stays, the rest goes back, and nothing of it counts as a failure."""

from __future__ import annotations

import time

from batchmill_core.job import Rows
from batchmill_ops.simulator import SimulatorConfig
from batchmill_ops.simulator.config import FaultRate
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill

ROWS = 60
GRACE_S = 1.0


def _assert_handed_back(mill: Mill, job: object) -> None:
    """Exactly the rows without a result wait in chunks that nobody blames."""
    chunks = mill.chunks(job)  # type: ignore[arg-type]  # a JobRecord
    waiting = [c for c in chunks if c.state == "ready"]
    rows = [n for c in waiting for n in Rows.parse(c.rows)]
    assert sorted(rows) == sorted(set(range(ROWS)) - mill.saved(job))  # type: ignore[arg-type]  # a JobRecord
    assert {c.state for c in chunks} == {"ready", "done"}
    assert {(c.crash_count, c.fail_count) for c in chunks} == {(0, 0)}
    assert all(c.not_before_ms == 0 for c in waiting)


def test_a_drained_worker_finishes_what_is_in_flight_and_hands_the_rest_back(make_mill: MakeMill) -> None:
    mill = make_mill(provider=SimulatorConfig(latency_s=0.3), account={"max_in_flight": 6})
    worker = mill.start_worker()
    job = mill.submit(ROWS, chunk_size=30)
    mill.wait_rows(job, 6)
    worker.terminate()
    exit_code = worker.wait_dead(20)

    assert exit_code == 0
    assert 6 <= len(mill.saved(job)) < ROWS
    assert {c.state for c in mill.calls(job)} <= {"settled", "void"}
    assert len(mill.bill()) == len(mill.saved(job))
    _assert_handed_back(mill, job)
    mill.start_worker()
    mill.wait_done(job)
    assert len(mill.bill()) == ROWS
    mill.invariants(job)


def test_calls_that_outlast_the_grace_are_cut_off_and_keep_their_bound(make_mill: MakeMill) -> None:
    hanging = SimulatorConfig(latency_s=0.05, faults=(FaultRate(kind="hang", probability=0.2),))
    mill = make_mill(provider=hanging, settings={"drain_s": GRACE_S}, account={"max_in_flight": 30})
    worker = mill.start_worker()
    job = mill.submit(ROWS, chunk_size=30)
    mill.wait_rows(job, 20)
    asked = time.monotonic()
    worker.terminate()
    exit_code = worker.wait_dead(20)
    took_s = time.monotonic() - asked

    assert exit_code == 0
    assert GRACE_S <= took_s < GRACE_S + 5
    cut_off = [c for c in mill.calls(job) if c.state == "unknown"]
    assert len(cut_off) == len(mill.bill()) - len(mill.saved(job)) > 0
    assert all(c.bound_nanousd > 0 for c in cut_off)
    _assert_handed_back(mill, job)
    assert mill.invariants(job).unknown_calls == len(cut_off)
