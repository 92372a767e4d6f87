"""A budget is never passed, however many workers race for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from batchmill_core.job import JobState
from batchmill_db import jobs, steering
from batchmill_db.jobs import JobRecord
from batchmill_ops.simulator import SimulatorConfig
from batchmill_ops.simulator.config import FaultRate
from tests.integration.conftest import MakeMill
from tests.integration.harness import POLL_S, Mill

ROWS = 300
WORKERS = 8
BUDGET_NANOUSD = 4_000_000  # room for about 40 calls at once by their bounds, and for half of the rows by their cost


@contextmanager
def _watched(mill: Mill, job: JobRecord) -> Iterator[list[int]]:
    """What the job held of its budget, read again and again during the block."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_S):
            with mill.database.reading() as conn:
                seen.append(jobs.get(conn, job.id).held_nanousd)

    thread = threading.Thread(target=watch, name="budget watch")
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _billed(mill: Mill) -> int:
    return sum(line.cost_nanousd or 0 for line in mill.bill())


def test_eight_workers_racing_for_a_budget_never_pass_it(make_mill: MakeMill) -> None:
    mill = make_mill(provider=SimulatorConfig(latency_s=0.05, latency_jitter=0.5))
    job = mill.submit(ROWS, chunk_size=20, ring=False, budget_nanousd=BUDGET_NANOUSD)
    with _watched(mill, job) as held:
        for worker in [mill.start_worker(ready=False, slots=4) for _ in range(WORKERS)]:
            worker.wait_ready()
        paused = mill.wait_state(job, JobState.PAUSED, JobState.DONE, timeout_s=60)
        lines = mill.calls(job)
        spent = _billed(mill)

    assert paused.reason_kind == "budget"
    assert spent <= max(held) <= BUDGET_NANOUSD
    assert {c.state for c in lines} <= {"settled", "void"}
    dearest = max(c.bound_nanousd for c in lines)
    assert paused.held_nanousd + dearest > BUDGET_NANOUSD
    assert ROWS // 4 < paused.done < ROWS
    mill.invariants(job)

    mill.database.run(lambda conn: steering.resume(conn, job.id, budget_nanousd=10 * BUDGET_NANOUSD))
    mill.wait_done(job)
    assert len(mill.bill()) == ROWS
    assert len({c.worker for c in mill.calls(job)}) > 1
    mill.invariants(job)


def test_a_call_of_unknown_cost_counts_as_its_bound(make_mill: MakeMill) -> None:
    nothing_said = SimulatorConfig(latency_s=0.02, faults=(FaultRate(kind="nousage", probability=1.0),))
    mill = make_mill(provider=nothing_said)
    mill.start_worker()
    job = mill.submit(ROWS, budget_nanousd=BUDGET_NANOUSD)
    paused = mill.wait_state(job, JobState.PAUSED, JobState.DONE)

    assert paused.reason_kind == "budget"
    assert paused.cost_nanousd == 0
    assert _billed(mill) < paused.unknown_nanousd <= BUDGET_NANOUSD
    mill.invariants(job)
