"""What is published, when, and in which order."""

from __future__ import annotations

from batchmill_core.job import Rows
from batchmill_db import chunks, doorbells, schema, steering, telemetry
from batchmill_db.chunks import NewChunk
from tests.conformance.db.world import QUEUE, World, child


def ids(world: World, job_id: int) -> list[int]:
    return [c["id"] for c in world.chunks(job_id)]


def test_a_queue_is_rung_within_its_window(world: World) -> None:
    job_id = world.job(sizes=(1,) * 5)

    rung = [world.ring(window=3) for _ in range(2)]

    assert rung == [ids(world, job_id)[:3], []]


def test_a_claimed_chunk_makes_room_in_the_window(world: World) -> None:
    job_id = world.job(sizes=(1,) * 5)
    world.ring(window=3)
    world.take(job_id)

    assert world.ring(window=3) == [ids(world, job_id)[3]]


def test_a_chunk_whose_message_was_lost_is_rung_again(world: World) -> None:
    job_id = world.job(sizes=(1, 1))
    world.ring(window=2)
    with world.database.transaction() as conn:
        conn.execute(schema.chunk.update().values(published_ms=schema.chunk.c.published_ms - 60_001))

    assert world.ring(window=2, again_after_ms=60_000) == ids(world, job_id)


def test_chunks_go_by_priority_then_age_across_jobs(world: World) -> None:
    usual = world.job(sizes=(1, 1), priority=5)
    urgent = world.job(sizes=(1, 1), priority=0)
    with world.database.transaction() as conn:
        chunks.add(conn, usual, [NewChunk(rows=Rows.span(0, 1), queue=QUEUE, priority=0)])

    rung = world.ring(window=4)

    assert rung == [*ids(world, urgent), ids(world, usual)[2], ids(world, usual)[0]]


def test_only_open_jobs_and_asked_queues_are_rung(world: World) -> None:
    paused, other, opened = world.job(), world.job(queue="api.other"), world.job()
    world.loading()
    with world.database.transaction() as conn:
        steering.pause(conn, paused, kind="user", reason="lunch")

    assert world.ring() == ids(world, opened)
    assert world.ring("api.other") == ids(world, other)


def test_the_published_chunks_of_a_paused_job_take_no_room(world: World) -> None:
    paused = world.job(sizes=(1, 1))
    world.ring(window=2)
    with world.database.transaction() as conn:
        steering.pause(conn, paused, kind="user", reason="lunch")
    opened = world.job(sizes=(1, 1))

    assert world.ring(window=2) == ids(world, opened)


def test_a_chunk_that_is_not_due_is_not_rung(world: World) -> None:
    job_id = world.job()
    world.release(world.take(job_id), [child([0], wait_ms=60_000), child([1])])

    assert world.ring() == [c["id"] for c in world.chunks(job_id) if c["rows"] == "1"]


def test_a_stopped_account_is_not_rung_until_it_is_healed(world: World) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        telemetry.stop_account(conn, "acme", kind="auth_failed", reason="bad key", probe_after_ms=1000)
        steering.resume(conn, job_id)
    stopped = world.ring()
    with world.database.transaction() as conn:
        telemetry.heal_account(conn, "acme")

    assert (stopped, world.ring()) == ([], ids(world, job_id))


def test_a_doorbell_says_in_words_what_it_is_for(world: World) -> None:
    world.job(sizes=(4,))

    with world.database.transaction() as conn:
        (bell,) = doorbells.ring(conn, windows={QUEUE: 1}, again_after_ms=1000)

    assert (bell.queue, bell.label) == (QUEUE, "reviews · rows 0-3 · small")


def test_the_label_of_many_scattered_rows_is_short() -> None:
    assert doorbells.label("reviews", Rows.of(range(0, 100, 2)), "small") == "reviews · rows 50 of 0-98 · small"


def test_resume_and_heal_make_chunks_publishable_at_once(world: World) -> None:
    job_id = world.job()
    world.ring()
    with world.database.transaction() as conn:
        steering.pause(conn, job_id, kind="user", reason="lunch")
        steering.resume(conn, job_id)
    resumed = world.ring()
    with world.database.transaction() as conn:
        telemetry.stop_account(conn, "acme", kind="auth_failed", reason="bad key", probe_after_ms=1000)
        telemetry.heal_account(conn, "acme")

    assert (resumed, world.ring()) == (ids(world, job_id), ids(world, job_id))


def test_queues_with_work_count_ready_and_leased_chunks_of_open_jobs(world: World) -> None:
    job_id = world.job(sizes=(1, 1, 1))
    world.take(job_id)
    paused = world.job(queue="api.other")
    with world.database.transaction() as conn:
        steering.pause(conn, paused, kind="user", reason="lunch")

    with world.database.reading() as conn:
        found = doorbells.queues_with_work(conn)

    assert found == {QUEUE: (2, 1)}


def test_overdue_chunks_are_those_that_nobody_took_in_time(world: World) -> None:
    job_id = world.job(sizes=(1, 1, 1))
    world.take(job_id)
    with world.database.transaction() as conn:
        conn.execute(schema.chunk.update().values(created_ms=schema.chunk.c.created_ms - 5000))
    world.job(sizes=(1,))

    with world.database.reading() as conn:
        found = doorbells.overdue(conn, [QUEUE, "api.other"], waited_ms=4000)

    assert found == ids(world, job_id)[1:]
