"""How soon the work of a dead worker is taken over, when the one who leads dies with it."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select

from batchmill_db.schema import leader, worker
from batchmill_ops.simulator import SimulatorConfig
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, until

ROWS = 40
SLOW = SimulatorConfig(latency_s=0.6)


def _leads(mill: Mill, pid: int) -> bool:
    with mill.database.reading() as conn:
        leads = select(worker.c.pid).join(leader, leader.c.holder == worker.c.id)
        return conn.execute(leads).scalar_one_or_none() == pid


def _seconds_to_take_over(mill: Mill) -> float:
    """Kills the worker that leads while it has calls in flight; answers how long another, once there, takes to finish."""
    first = mill.start_worker("first")
    until("the first worker leads", lambda: _leads(mill, first.pid))
    job = mill.submit(ROWS, chunk_size=10)
    until("every call is in flight", lambda: mill.sent() == ROWS)
    first.kill()
    mill.start_worker("second")
    there = time.monotonic()
    mill.wait_done(job, timeout_s=100)
    took_s = time.monotonic() - there
    mill.invariants(job)
    assert all(c.crash_count == 1 for c in mill.chunks(job))
    return took_s


def test_work_is_taken_over_within_15_s_with_a_lease_of_10_s(make_mill: MakeMill) -> None:
    mill = make_mill(settings={"lease_s": 10}, provider=SLOW)

    assert _seconds_to_take_over(mill) < 15


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["sqlite_url"], indirect=True, ids=["sqlite"])
def test_work_is_taken_over_within_90_s_by_default(make_mill: MakeMill) -> None:
    mill = make_mill(provider=SLOW)

    assert _seconds_to_take_over(mill) < 90
