"""A chunk's life: claimed once, kept by heartbeats, released with what is left, taken back when its worker dies."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from batchmill_core.job import CONTRACT_VERSION, Rows
from batchmill_core.request import RowStatus
from batchmill_db import chunks, merging, reaping, rounds, schema, steering
from batchmill_db.chunks import Claim, NewChunk
from batchmill_db.reaping import CRASH_LIMIT
from batchmill_db.session import now_ms
from batchmill_db.verify import verify
from tests.conformance.db.world import LEASE_MS, QUEUE, World, answered, child, settled, spec


def rows_by_state(world: World, job_id: int, state: str) -> list[str]:
    return sorted(c["rows"] for c in world.chunks(job_id, state=state))


def lease_left_ms(world: World, chunk_id: int) -> int:
    with world.database.reading() as conn:
        now: int = conn.execute(select(now_ms())).scalar_one()
    return int(world.chunk(chunk_id)["lease_until_ms"]) - now


def test_a_claim_tells_what_a_worker_needs(world: World) -> None:
    job_id = world.job(budget=5)
    chunk_id = world.chunks(job_id)[0]["id"]

    claim = world.claim(chunk_id)

    assert claim == Claim(
        chunk_id=chunk_id,
        fence=1,
        job_id=job_id,
        job_name="reviews",
        rows=Rows.span(0, 4),
        queue=QUEUE,
        step=0,
        round=1,
        spec=claim.spec if claim else "",
        budgeted=True,
        fresh=True,
    )
    with world.database.reading() as conn:
        assert rounds.spec_of(conn, job_id, 1) == spec()


def test_a_chunk_is_claimed_once(world: World) -> None:
    job_id = world.job()
    chunk_id = world.chunks(job_id)[0]["id"]

    claims = [world.claim(chunk_id, worker) for worker in ("w1", "w2")]

    assert [c is not None for c in claims] == [True, False]
    assert world.chunk(chunk_id)["lease_owner"] == "w1"


def test_a_chunk_that_is_not_there_is_not_to_be_had(world: World) -> None:
    assert world.claim(4711) is None


@pytest.mark.parametrize("state", ["loading", "paused", "cancelled", "done"])
def test_a_chunk_of_a_job_that_is_not_open_is_not_to_be_had(world: World, state: str) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        conn.execute(schema.job.update().values(state=state))

    assert world.claim(world.chunks(job_id)[0]["id"]) is None


def test_a_chunk_waits_until_it_is_due(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.release(claim, [child([0], wait_ms=600_000), child([1, 2, 3])])

    late, due = (world.claim(c["id"]) for c in world.chunks(job_id, state="ready"))

    assert (late, due and due.rows) == (None, Rows.span(1, 3))


def test_a_chunk_of_a_newer_contract_is_left_to_workers_that_know_it(world: World) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        conn.execute(schema.chunk.update().values(contract=CONTRACT_VERSION + 1))

    assert world.claim(world.chunks(job_id)[0]["id"]) is None


def test_a_claim_after_a_crash_is_not_fresh(world: World) -> None:
    job_id = world.job()
    world.take(job_id)
    world.crash()

    claim = world.take(job_id)

    assert (claim.fence, claim.fresh) == (3, False)


def test_a_heartbeat_names_the_leases_that_are_lost(world: World) -> None:
    job_id = world.job(sizes=(2, 2))
    kept, lost = world.take(job_id, "w1"), world.take(job_id, "w2")
    world.crash("w2")
    leases = {kept.chunk_id: kept.fence, lost.chunk_id: lost.fence, 4711: 1}

    with world.database.transaction() as conn:
        answer = chunks.heartbeat(conn, leases, lease_ms=LEASE_MS)

    assert answer == {lost.chunk_id, 4711}


def test_a_heartbeat_moves_the_end_of_the_lease(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    with world.database.transaction() as conn:
        lost = chunks.heartbeat(conn, {claim.chunk_id: claim.fence}, lease_ms=10 * LEASE_MS)

    assert lost == set()
    assert lease_left_ms(world, claim.chunk_id) > 9 * LEASE_MS


def test_a_release_hands_its_unfinished_rows_on(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    released = world.release(claim, [child([1]), child([2, 3], queue="api.other", step=1)])

    assert released
    born = [(c["rows"], c["queue"], c["step"], c["parent_id"]) for c in world.chunks(job_id, state="ready")]
    assert born == [("1", QUEUE, 0, claim.chunk_id), ("2-3", "api.other", 1, claim.chunk_id)]
    assert world.chunk(claim.chunk_id)["state"] == "done"


def test_a_repeated_release_adds_no_children(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    answers = [world.release(claim, [child([1, 2])]) for _ in range(2)]

    assert answers == [True, True]
    assert world.states(job_id) == ["done", "ready"]


def test_an_attempt_that_lost_its_chunk_releases_nothing(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.crash()

    released = world.release(claim, [child([1, 2])])

    assert not released
    assert world.states(job_id) == ["ready"]


def test_deriving_the_same_children_twice_adds_them_once(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    with world.database.transaction() as conn:
        for _ in range(2):
            chunks.derive(conn, claim, [child([1]), child([2])])

    assert rows_by_state(world, job_id, "ready") == ["1", "2"]


def test_a_lease_that_has_not_run_out_is_not_reaped(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    with world.database.transaction() as conn:
        reaped = reaping.reap(conn)

    assert reaped == []
    assert world.chunk(claim.chunk_id)["state"] == "leased"


def test_expiring_leases_names_only_their_owners(world: World) -> None:
    job_id = world.job(sizes=(2, 2))
    dead, alive = world.take(job_id, "dead"), world.take(job_id, "alive")

    reaped = world.crash("dead")

    assert [r.chunk_id for r in reaped] == [dead.chunk_id]
    assert world.chunk(alive.chunk_id)["state"] == "leased"


def test_a_reaped_chunk_is_ready_at_once_with_a_higher_fence_and_one_more_crash(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    (reaped,) = world.crash()

    chunk = world.chunk(claim.chunk_id)
    assert (reaped.outcome, reaped.crash_count) == ("ready", 1)
    assert (chunk["state"], chunk["fence"], chunk["lease_owner"], chunk["published_ms"]) == ("ready", 2, None, None)


def test_a_chunk_is_reaped_once(world: World) -> None:
    job_id = world.job()
    world.take(job_id)
    world.crash()

    again = world.crash()

    assert again == []
    assert world.chunks(job_id)[0]["crash_count"] == 1


def test_a_chunk_of_a_cancelled_job_is_cancelled_when_its_worker_dies(world: World) -> None:
    job_id = world.job()
    for _ in range(CRASH_LIMIT - 1):
        world.take(job_id)
        world.crash()
    world.take(job_id)
    with world.database.transaction() as conn:
        steering.cancel(conn, job_id)

    (reaped,) = world.crash()

    assert (reaped.outcome, world.states(job_id)) == ("cancelled", ["cancelled"])


def test_leases_are_extended_after_an_outage_but_not_those_of_the_known_dead(world: World) -> None:
    job_id = world.job(sizes=(2, 2, 2))
    first, second, dead = (world.take(job_id, w) for w in ("w1", "w2", "dead"))
    with world.database.transaction() as conn:
        conn.execute(schema.chunk.update().where(schema.chunk.c.id == first.chunk_id).values(lease_until_ms=1))
        reaping.expire_leases(conn, worker_ids=["dead"])
        extended = reaping.extend_all(conn, 30_000)
        reaped = reaping.reap(conn)

    assert extended == 1
    assert [r.chunk_id for r in reaped] == [dead.chunk_id]
    assert 20_000 < lease_left_ms(world, first.chunk_id) <= 30_000
    assert lease_left_ms(world, second.chunk_id) > LEASE_MS - 60_000


def test_a_row_that_kills_its_workers_is_found_by_halving(world: World) -> None:
    job_id = world.job(sizes=(8,))
    killer, crashes = 5, 0
    while ready := world.chunks(job_id, state="ready"):
        claim = world.claim(ready[0]["id"])
        assert claim is not None
        if killer in claim.rows:
            world.crash()
            crashes += 1
        else:
            world.answer_all(claim)
    world.finish()

    job = world.get(job_id)
    assert (job.state, job.by_status[RowStatus.OK], job.by_status[RowStatus.DEAD]) == ("done", 7, 1)
    assert crashes == CRASH_LIMIT + 3  # then halves of 4, 2 and 1
    with world.database.reading() as conn:
        assert list(reaping.dead_rows(conn, job_id)) == [killer]
        assert verify(conn, job_id) == []


def test_rows_that_were_saved_before_the_crash_are_left_out_of_the_halves(world: World) -> None:
    job_id = world.job(sizes=(4,))
    for seq in range(1, CRASH_LIMIT + 1):
        claim = world.take(job_id)
        world.reserve(claim, [seq])
        if seq == 1:
            world.save(claim, 1, [answered(0, 1)], [settled(1)])
        world.crash()

    assert world.states(job_id) == ["done", "ready", "ready"]
    assert rows_by_state(world, job_id, "ready") == ["1-2", "3"]


def test_a_chunk_that_crashes_after_its_last_row_was_saved_is_done(world: World) -> None:
    job_id = world.job(sizes=(2,))
    for _ in range(CRASH_LIMIT - 1):
        world.take(job_id)
        world.crash()
    world.answer_all(world.take(job_id), releases=False)

    (reaped,) = world.crash()

    assert (reaped.outcome, world.states(job_id)) == ("done", ["done"])
    with world.database.reading() as conn:
        assert verify(conn, job_id) == []


def test_a_row_with_a_result_of_an_earlier_round_is_not_dead_for_a_crash(world: World) -> None:
    job_id = world.job(sizes=(1,))
    world.answer_all(world.take(job_id), status=RowStatus.FAILED)
    world.finish()
    world.retry(job_id, [RowStatus.FAILED])
    for _ in range(CRASH_LIMIT):
        world.take(job_id)
        world.crash()
    world.finish()

    job = world.get(job_id)
    assert (job.by_status[RowStatus.FAILED], job.by_status[RowStatus.DEAD]) == (1, 0)
    with world.database.reading() as conn:
        assert verify(conn, job_id) == []


def test_dead_rows_that_are_retried_are_dead_no_more(world: World) -> None:
    job_id = world.job(sizes=(1,))
    for _ in range(CRASH_LIMIT):
        world.take(job_id)
        world.crash()
    world.finish()

    world.retry(job_id, [RowStatus.DEAD])
    world.answer_all(world.take(job_id))
    world.finish()

    job = world.get(job_id)
    assert (job.by_status[RowStatus.OK], job.by_status[RowStatus.DEAD]) == (1, 0)
    with world.database.reading() as conn:
        assert verify(conn, job_id) == []


def test_small_children_of_one_kind_are_merged(world: World) -> None:
    job_id = world.job(sizes=(8,))
    claim = world.take(job_id)
    children = [
        child([0]),
        child([2, 3]),
        child([5]),
        child([6], queue="api.other", step=1),
        child([7], wait_ms=60_000),
    ]
    world.release(claim, children)

    with world.database.transaction() as conn:
        gone = [merging.merge(conn) for _ in range(2)]

    assert gone == [2, 0]
    assert rows_by_state(world, job_id, "ready") == ["0,2-3,5", "6", "7"]
    merged = next(c for c in world.chunks(job_id) if c["rows"] == "0,2-3,5")
    assert world.claim(merged["id"]) is not None


def test_a_merge_stays_within_its_limit_of_rows(world: World) -> None:
    job_id = world.job(sizes=(9,))
    world.release(world.take(job_id), [child([0, 1, 2]), child([3, 4, 5]), child([6, 7, 8])])

    with world.database.transaction() as conn:
        gone = merging.merge(conn, limit_rows=6)

    assert gone == 1
    assert rows_by_state(world, job_id, "ready") == ["0-5", "6-8"]


def test_chunks_that_crashed_are_not_merged(world: World) -> None:
    job_id = world.job(sizes=(4,))
    world.release(world.take(job_id), [child([0, 1]), child([2, 3])])
    world.take(job_id)
    world.crash()

    with world.database.transaction() as conn:
        gone = merging.merge(conn)

    assert gone == 0


def test_counts_tell_how_chunks_stand_and_what_they_wait_for(world: World) -> None:
    job_id = world.job(sizes=(3, 1))
    world.release(world.take(job_id), [child([0]), child([1], queue="api.other", wait_ms=60_000)])
    world.take(job_id)

    with world.database.reading() as conn:
        counts = chunks.counts(conn, job_id)

    assert counts.by_state == {"done": 1, "leased": 1, "ready": 2}
    assert sorted(counts.queues) == [QUEUE, "api.other"]
    assert counts.next_due_ms == world.chunks(job_id, state="ready")[-1]["not_before_ms"]


def test_adding_no_chunks_is_no_statement(world: World) -> None:
    job_id = world.loading()

    with world.database.transaction() as conn:
        chunks.add(conn, job_id, [])
        chunks.add(conn, job_id, [NewChunk(rows=Rows.span(0, 2), queue=QUEUE, priority=1)])

    assert [(c["rows"], c["priority"], c["state"]) for c in world.chunks(job_id)] == [("0-1", 1, "ready")]
