"""What the metrics page reads, the same on both databases."""

from __future__ import annotations

from sqlalchemy import insert

from batchmill_core.errors import CallState
from batchmill_core.job import JobState
from batchmill_db import gauges, steering
from batchmill_db.gauges import Gauges, Spent
from batchmill_db.schema import device_sample
from batchmill_db.session import now_ms
from tests.conformance.db.world import BOUND, COST, QUEUE, USAGE, World, answered, ended, settled


def read(world: World, *, ended_jobs: int = 50) -> Gauges:
    return world.database.read(lambda conn: gauges.read(conn, ended_jobs=ended_jobs))


def spent(world: World) -> list[Spent]:
    return world.database.read(gauges.spent)


def test_an_empty_database_has_nothing_to_tell(world: World) -> None:
    now = read(world)

    assert (now.jobs, now.queues, now.workers, now.in_flight, now.devices) == ([], {}, [], {}, [])
    assert spent(world) == []


def test_jobs_that_ended_are_shown_up_to_a_number_and_others_all(world: World) -> None:
    ended = [world.job(name=f"ended {n}") for n in range(3)]
    going = [world.job(name=f"going {n}") for n in range(3)]
    with world.database.transaction() as conn:
        for job_id in ended:
            steering.cancel(conn, job_id)

    now = read(world, ended_jobs=1)

    assert [j.id for j in now.jobs] == [ended[-1], *going]
    assert now.job_states == {JobState.CANCELLED: 3, JobState.OPEN: 3}


def test_queues_have_ready_and_leased_chunks(world: World) -> None:
    job_id = world.job(sizes=(2, 2, 2))
    world.claim(world.chunks(job_id)[0]["id"])

    assert read(world).queues == {QUEUE: (2, 1)}


def test_the_newest_sample_of_a_device_counts_until_it_is_old(world: World) -> None:
    with world.database.transaction() as conn:
        for device, ago_ms, use in (("0", 3000, 10.0), ("0", 1000, 20.0), ("1", 600_000, 30.0)):
            values = {"at_ms": now_ms() - ago_ms, "host": "h", "device": device, "use_percent": use}
            conn.execute(insert(device_sample).values(**values))

    (sample,) = read(world).devices

    assert (sample.device, sample.figures) == ("0", {"use_percent": 20.0})


def test_the_ledger_is_summed_by_what_became_of_each_call(world: World) -> None:
    claim = world.take(world.job(sizes=(5,)))
    world.reserve(claim, range(1, 6))
    ends = [settled(1), settled(2, wasted=True), ended(3, CallState.UNKNOWN), ended(4, CallState.VOID)]
    world.save(claim, 1, [answered(0, 1)], ends)

    (total,) = spent(world)

    assert (total.account, total.model) == ("acme", "small")
    assert dict(total.calls) == {"settled": 2, "unknown": 1, "void": 1, "reserved": 1}
    assert (total.settled, total.wasted, total.unknown, total.reserved) == (2 * COST, COST, BOUND, BOUND)
    assert total.tokens["input"] == 2 * USAGE.input
    assert total.unpriced_calls == 0
    assert read(world).in_flight == {("acme", "small"): 1}


def test_a_settled_call_without_a_price_is_counted_and_not_taken_for_free(world: World) -> None:
    claim = world.take(world.job(sizes=(1,)))
    world.reserve(claim, [1])
    world.save(claim, 1, [answered(0, 1, cost_nanousd=None)], [settled(1, cost=None)])

    (total,) = spent(world)

    assert (total.settled, total.unpriced_calls) == (0, 1)
