"""Workers that come back after their lease, and messages that come more than once."""

from __future__ import annotations

import redis

from batchmill_core.broker import KEY_PREFIX, publish
from batchmill_core.job import ChunkState
from batchmill_db import steering
from batchmill_ops.simulator import SimulatorConfig
from tests.integration.conftest import MakeMill
from tests.integration.harness import QUEUE, Mill, until

ROWS = 30
SLOW = SimulatorConfig(latency_s=1.5)  # long enough to freeze a worker while its calls are in flight


def _freeze_with_calls_in_flight(mill: Mill) -> None:
    until("every call has reached the provider", lambda: mill.sent() == ROWS)
    mill.freeze(mill.workers[0])


def test_a_worker_frozen_past_its_lease_overwrites_nothing_when_it_wakes(make_mill: MakeMill) -> None:
    mill = make_mill(settings={"lease_s": 3}, provider=SLOW)
    zombie = mill.start_worker("zombie")
    with mill.leading():
        job = mill.submit(ROWS, chunk_size=ROWS)
        _freeze_with_calls_in_flight(mill)
        mill.start_worker("heir")
        mill.wait_done(job)
        answered = mill.results(job)
        zombie.thaw()
        until("its late calls are settled", lambda: all(c.state == "settled" for c in mill.calls(job)))

    assert mill.results(job) == answered
    late = [c for c in mill.calls(job) if c.fence == 1]
    assert [c.wasted for c in late] == [True] * ROWS
    done = mill.invariants(job)
    assert done.wasted_nanousd == sum(c.cost_nanousd for c in late)
    assert done.cost_nanousd == sum(line.cost_nanousd or 0 for line in mill.bill())


def test_late_answers_fill_the_places_that_are_still_empty(make_mill: MakeMill) -> None:
    mill = make_mill(settings={"lease_s": 3}, provider=SLOW)
    zombie = mill.start_worker("zombie")
    with mill.leading():
        job = mill.submit(ROWS, chunk_size=ROWS)
        _freeze_with_calls_in_flight(mill)
        until("its lease is reaped", lambda: mill.chunks(job)[0].state == ChunkState.READY)
        mill.database.run(lambda conn: steering.pause(conn, job.id, kind="user", reason="so that nobody claims it"))
        zombie.thaw()
        mill.wait_rows(job, ROWS)
        mill.database.run(lambda conn: steering.resume(conn, job.id))
        mill.wait_done(job)

    assert mill.invariants(job).wasted_nanousd == 0
    assert len(mill.bill()) == ROWS


def test_a_chunk_runs_once_however_often_it_is_rung_for_and_its_message_delivered(make_mill: MakeMill) -> None:
    mill = make_mill(provider=SimulatorConfig(latency_s=0.3))
    job = mill.submit(ROWS, chunk_size=ROWS, ring=False)
    for _ in range(5):
        publish(mill.app, mill.chunks(job)[0].id, QUEUE, "five times")
    with redis.Redis.from_url(mill.settings.broker_url or "") as client:
        twice = client.lindex(f"{KEY_PREFIX}{QUEUE}", 0)
        client.rpush(f"{KEY_PREFIX}{QUEUE}", twice)
    mill.start_worker(ready=False)
    mill.start_worker()
    mill.wait_done(job)
    until("all messages are taken", lambda: _messages(mill) == 0)

    assert mill.chunks(job)[0].fence == 1
    assert len(mill.bill()) == ROWS
    mill.invariants(job)


def _messages(mill: Mill) -> int:
    with redis.Redis.from_url(mill.settings.broker_url or "") as client:
        return int(client.llen(f"{KEY_PREFIX}{QUEUE}"))
