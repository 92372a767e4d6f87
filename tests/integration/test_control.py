"""Pause, resume and cancel take effect within 2 s."""

from __future__ import annotations

import time

from batchmill_core.job import ChunkState, JobState
from batchmill_db import steering
from batchmill_db.jobs import JobRecord
from batchmill_ops.simulator import SimulatorConfig
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, until

ROWS = 2000
EFFECT_S = 2.0
QUIET_S = 1.0


def _mill_at_work(make_mill: MakeMill) -> tuple[Mill, JobRecord]:
    mill = make_mill(provider=SimulatorConfig(latency_s=0.1), account={"max_in_flight": 16})
    mill.start_worker()
    job = mill.submit(ROWS, chunk_size=100)
    mill.wait_rows(job, 32)
    return mill, job


def _last_call_after_s(mill: Mill) -> float:
    """Seconds until the provider got its last call, known when it got none for a while."""
    began = last = time.monotonic()
    seen = mill.sent()

    def quiet() -> bool:
        nonlocal seen, last
        if (now := mill.sent()) != seen:
            seen, last = now, time.monotonic()
        return time.monotonic() - last > QUIET_S

    until("the provider gets no more calls", quiet)
    return last - began


def test_pause_and_resume_take_effect_within_2_s(make_mill: MakeMill) -> None:
    mill, job = _mill_at_work(make_mill)
    mill.database.run(lambda conn: steering.pause(conn, job.id, kind="user", reason="paused by the user"))
    paused_after_s = _last_call_after_s(mill)
    until("no chunk is leased", lambda: all(c.state != ChunkState.LEASED for c in mill.chunks(job)))
    sent = mill.sent()
    mill.invariants(job)
    mill.database.run(lambda conn: steering.resume(conn, job.id))
    resumed = time.monotonic()
    until("a call is sent again", lambda: mill.sent() > sent)
    resumed_after_s = time.monotonic() - resumed
    mill.database.run(lambda conn: steering.cancel(conn, job.id))

    assert paused_after_s < EFFECT_S
    assert resumed_after_s < EFFECT_S
    assert all(c.crash_count == c.fail_count == 0 for c in mill.chunks(job))


def test_cancel_takes_effect_within_2_s_and_keeps_what_is_paid(make_mill: MakeMill) -> None:
    mill, job = _mill_at_work(make_mill)
    mill.database.run(lambda conn: steering.cancel(conn, job.id))
    cancelled_after_s = _last_call_after_s(mill)
    until("no chunk is leased", lambda: all(c.state != ChunkState.LEASED for c in mill.chunks(job)))

    assert cancelled_after_s < EFFECT_S
    assert mill.invariants(job).state is JobState.CANCELLED
    assert {c.state for c in mill.chunks(job)} == {ChunkState.DONE, ChunkState.CANCELLED}
    assert 32 <= len(mill.saved(job)) == len(mill.bill()) < ROWS
