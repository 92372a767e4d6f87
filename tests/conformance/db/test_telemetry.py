"""Workers, the leader and accounts."""

from __future__ import annotations

from typing import Any

from batchmill_core.job import JobState
from batchmill_db import schema, steering, telemetry
from batchmill_db.telemetry import WorkerRecord
from tests.conformance.db.world import QUEUE, World


def worker(worker_id: str = "w1", **more: Any) -> WorkerRecord:
    known: dict[str, Any] = {
        "name": f"host/{worker_id}",
        "host": "host",
        "pid": 7,
        "wing": "api",
        "queues": (QUEUE, "api.other"),
        "slots": 4,
        "version": "0.1.0",
    }
    return WorkerRecord(id=worker_id, **(known | more))


def register(world: World, *workers: WorkerRecord) -> None:
    with world.database.transaction() as conn:
        for w in workers:
            telemetry.register(conn, w)


def silent_for(world: World, worker_id: str, ms: int) -> None:
    with world.database.transaction() as conn:
        mine = schema.worker.update().where(schema.worker.c.id == worker_id)
        conn.execute(mine.values(beat_ms=schema.worker.c.beat_ms - ms))


def test_a_registered_worker_is_live_with_its_queues(world: World) -> None:
    register(world, worker(), worker())

    with world.database.reading() as conn:
        (found,) = telemetry.live_workers(conn)

    assert (found.id, found.queues, found.slots, found.state) == ("w1", (QUEUE, "api.other"), 4, "starting")
    assert found.age_ms < 15_000


def test_a_worker_that_is_silent_is_not_live(world: World) -> None:
    register(world, worker("w1"), worker("w2"))
    silent_for(world, "w1", 16_000)

    with world.database.reading() as conn:
        found = [w.id for w in telemetry.live_workers(conn)]

    assert found == ["w2"]


def test_a_beat_tells_what_a_worker_does(world: World) -> None:
    register(world, worker())
    silent_for(world, "w1", 16_000)

    with world.database.transaction() as conn:
        telemetry.beat(conn, "w1", state="ready", in_flight=3, throttled="429", load_ms=12)
        (found,) = telemetry.live_workers(conn)

    assert (found.state, found.in_flight, found.throttled) == ("ready", 3, "429")


def test_a_worker_that_is_unfit_says_why_even_when_buried(world: World) -> None:
    register(world, worker())

    with world.database.transaction() as conn:
        telemetry.beat(conn, "w1", state="unfit", reason="no CUDA")
        telemetry.bury(conn, ["w1"])
        live, unfit = telemetry.live_workers(conn), telemetry.unfit_workers(conn)

    assert live == []
    assert [(w.id, w.reason) for w in unfit] == [("w1", "no CUDA")]


def test_workers_are_found_by_host_and_process(world: World) -> None:
    register(world, worker("w1"), worker("w2", pid=8), worker("w3", host="other"))

    with world.database.transaction() as conn:
        by_process = telemetry.workers_of_process(conn, "host", 8)
        telemetry.bury(conn, ["w1"])
        by_host = [w.id for w in telemetry.workers_of_host(conn, "host")]

    assert (by_process, by_host) == (["w2"], ["w2"])


def test_workers_of_long_ago_are_forgotten(world: World) -> None:
    register(world, worker("w1"), worker("w2"))
    silent_for(world, "w1", 8 * 86_400_000)

    with world.database.transaction() as conn:
        telemetry.prune_workers(conn)

    assert [w["id"] for w in world.table(schema.worker)] == ["w2"]


def lead(world: World, holder: str, ttl_ms: int = 60_000) -> telemetry.Leadership:
    with world.database.transaction() as conn:
        return telemetry.lead(conn, "dispatcher", holder, ttl_ms=ttl_ms)


def test_one_leads_and_keeps_the_lead(world: World) -> None:
    answers = [lead(world, holder) for holder in ("a", "b", "a")]

    assert [a.leads for a in answers] == [True, False, True]
    assert answers[0].since_tick_ms is None
    assert answers[2].since_tick_ms is not None


def test_a_leader_that_is_silent_loses_the_lead(world: World) -> None:
    lead(world, "a", ttl_ms=-1000)

    assert lead(world, "b").leads
    assert not lead(world, "a").leads


def test_a_leader_that_resigns_is_followed_at_once(world: World) -> None:
    lead(world, "a")
    with world.database.transaction() as conn:
        telemetry.resign(conn, "dispatcher", "b")
    still = lead(world, "b").leads
    with world.database.transaction() as conn:
        telemetry.resign(conn, "dispatcher", "a")

    assert (still, lead(world, "b").leads) == (False, True)


def stop(world: World, *, probe_after_ms: int = 60_000, reason: str = "bad key") -> bool:
    with world.database.transaction() as conn:
        return telemetry.stop_account(conn, "acme", kind="auth_failed", reason=reason, probe_after_ms=probe_after_ms)


def test_a_stopped_account_pauses_its_open_jobs_with_the_reason(world: World) -> None:
    job_id, other = world.job(), world.job(queue="api.other")

    stopped = [stop(world), stop(world, reason="still")]

    job = world.get(job_id)
    assert stopped == [True, False]
    assert (job.state, job.reason_kind, job.reason_account) == (JobState.PAUSED, "account", "acme")
    assert job.reason == "account acme is stopped: bad key"
    assert world.get(other).state == JobState.OPEN


def test_a_healed_account_opens_the_jobs_it_had_paused_and_no_others(world: World) -> None:
    job_id, by_user = world.job(), world.job()
    with world.database.transaction() as conn:
        steering.pause(conn, by_user, kind="user", reason="lunch")
    stop(world)

    with world.database.transaction() as conn:
        opened = [telemetry.heal_account(conn, "acme") for _ in range(2)]
        account = telemetry.accounts(conn)["acme"]

    assert opened == [[job_id], []]
    assert (account.state, account.reason, account.probe_at_ms) == ("ok", None, None)
    assert [world.get(j).state for j in (job_id, by_user)] == [JobState.OPEN, JobState.PAUSED]


def test_a_due_probe_is_taken_by_one(world: World) -> None:
    stop(world, probe_after_ms=-1000)

    with world.database.transaction() as conn:
        taken = [telemetry.due_probes(conn, ["acme", "other"], next_after_ms=60_000) for _ in range(2)]

    assert [[(a.name, a.probes) for a in t] for t in taken] == [[("acme", 1)], []]


def test_a_probe_that_is_not_due_or_not_ours_is_left_alone(world: World) -> None:
    stop(world)

    with world.database.transaction() as conn:
        assert telemetry.due_probes(conn, ["acme"], next_after_ms=1) == []
        assert telemetry.due_probes(conn, [], next_after_ms=1) == []


def test_an_account_that_stops_again_counts_its_probes_anew(world: World) -> None:
    stop(world, probe_after_ms=-1000)
    with world.database.transaction() as conn:
        telemetry.due_probes(conn, ["acme"], next_after_ms=1)
        telemetry.heal_account(conn, "acme")

    stopped = stop(world, reason="no credit")

    with world.database.reading() as conn:
        account = telemetry.accounts(conn)["acme"]
    assert (stopped, account.state, account.reason, account.probes) == (True, "stopped", "no credit", 0)
