"""Many processes at the same rows at the same moment."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

from batchmill_db import reaping, telemetry
from batchmill_db.verify import verify
from tests.conformance.db.racers import claim_all, lead_a_lot, race, spend
from tests.conformance.db.world import BOUND, World


def test_of_eight_processes_each_chunk_has_one_owner(world: World, migrated_url: str) -> None:
    job_id = world.job(sizes=(1,) * 25)
    ids = [c["id"] for c in world.chunks(job_id)]

    claimed = race(claim_all, migrated_url, 8, ids)

    assert sorted(i for mine in claimed for i in mine) == ids
    owners = {c["id"]: c["lease_owner"] for c in world.chunks(job_id)}
    assert owners == {i: f"racer{n}" for n, mine in enumerate(claimed) for i in mine}


def test_eight_workers_that_race_for_a_budget_never_pass_it(world: World, migrated_url: str) -> None:
    job_id = world.job(sizes=(1,) * 8, budget=30 * BOUND)
    ids = [c["id"] for c in world.chunks(job_id)]

    spent = race(spend, migrated_url, 8, ids)

    job = world.get(job_id)
    assert sum(s["over"] for s in spent) == 0
    assert sum(s["accepted"] for s in spent) > 30  # what was settled made room
    assert job.held_nanousd <= 30 * BOUND < job.held_nanousd + BOUND
    with world.database.reading() as conn:
        assert verify(conn, job_id) == []


def test_there_are_never_two_leaders(world: World, migrated_url: str) -> None:
    held = race(lead_a_lot, migrated_url, 4)

    # A lead is [until - 5, until]; who follows begins after the end of who was before.
    spans = sorted((until - 5, until, name) for name, mine in enumerate(held) for until in mine)
    assert len(spans) > 150
    for (_, until, before), (start, _, after) in itertools.pairwise(spans):
        assert before == after or start >= until


def test_threads_of_one_process_reap_each_chunk_once(world: World) -> None:
    job_id = world.job(sizes=(1,) * 20)
    for _ in range(20):
        world.take(job_id)
    with world.database.transaction() as conn:
        reaping.expire_leases(conn, worker_ids=["w1"])
    start = threading.Barrier(8)

    def reap() -> list[int]:
        start.wait()
        return [r.chunk_id for r in world.database.run(reaping.reap)]

    with ThreadPoolExecutor(8) as pool:
        reaped = [f.result() for f in [pool.submit(reap) for _ in range(8)]]

    assert sorted(i for mine in reaped for i in mine) == [c["id"] for c in world.chunks(job_id)]
    assert {c["crash_count"] for c in world.chunks(job_id)} == {1}


def test_a_probe_is_taken_by_one_of_eight_threads(world: World) -> None:
    with world.database.transaction() as conn:
        telemetry.stop_account(conn, "acme", kind="auth_failed", reason="bad key", probe_after_ms=-1000)
    start = threading.Barrier(8)

    def probe() -> int:
        start.wait()
        return len(world.database.run(lambda conn: telemetry.due_probes(conn, ["acme"], next_after_ms=60_000)))

    with ThreadPoolExecutor(8) as pool:
        taken = [f.result() for f in [pool.submit(probe) for _ in range(8)]]

    assert sum(taken) == 1
