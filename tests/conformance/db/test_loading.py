"""Jobs whose data set is being read: opened early, left by a loader that died, gone on with, dropped."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from batchmill_core.errors import JobError
from batchmill_core.job import JobState, Rows
from batchmill_db import chunks, jobs, loading, payload_store, steering
from batchmill_db.chunks import NewChunk
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import leader, payload
from batchmill_db.session import Connection, now_ms
from tests.conformance.db.world import QUEUE, World


def eager(world: World, *, key: str | None = "k") -> int:
    """A job that is open with one chunk, while its loader reads on."""
    job_id = world.loading(key=key)
    with world.database.transaction() as conn:
        loading.beat(conn, job_id, "here:1")
        payload_store.add_payloads(conn, job_id, [(0, 4, b"requests", b"inputs", "digest 0")])
        chunks.add(conn, job_id, [NewChunk(rows=Rows.span(0, 4), queue=QUEUE, priority=5)])
        loading.note(conn, job_id, n_rows=4, n_skipped=0, skipped=[], columns=["text"])
        loading.open_early(conn, job_id)
    return job_id


def now(world: World, job_id: int) -> JobRecord:
    with world.database.reading() as conn:
        return jobs.get(conn, job_id)


def silence(conn: Connection, for_ms: int) -> None:
    conn.execute(update(leader).values(until_ms=now_ms() - for_ms))


def test_a_job_is_opened_before_it_is_read_once(world: World) -> None:
    job_id = eager(world)
    with world.database.transaction() as conn:
        again = loading.open_early(conn, job_id)

    assert (now(world, job_id).state, now(world, job_id).loaded, again) == (JobState.OPEN, False, False)


def test_a_job_whose_loader_died_is_paused_with_the_reason_and_a_beat_opens_it_again(world: World) -> None:
    job_id = eager(world)
    with world.database.transaction() as conn:
        living = loading.sweep(conn)
        silence(conn, 1)
        swept, again = loading.sweep(conn), loading.sweep(conn)
    paused = now(world, job_id)
    with world.database.transaction() as conn:
        loading.beat(conn, job_id, "here:2")

    assert (living, swept, again) == ([], [job_id], [])
    assert (paused.state, paused.reason_kind) == (JobState.PAUSED, "source")
    assert paused.reason is not None
    assert "ended before the end of it" in paused.reason
    assert now(world, job_id).state is JobState.OPEN


def test_a_source_that_failed_is_paused_until_it_is_read_to_its_end(world: World) -> None:
    job_id = eager(world)
    with world.database.transaction() as conn:
        loading.stop(conn, job_id, "line 5 is no JSON")
    paused = now(world, job_id)
    with world.database.transaction() as conn:
        loading.end(conn, job_id)

    assert (paused.state, paused.reason) == (JobState.PAUSED, "line 5 is no JSON")
    assert (now(world, job_id).state, now(world, job_id).loaded) == (JobState.OPEN, True)


def test_a_job_that_its_user_paused_stays_paused_when_its_data_set_is_read(world: World) -> None:
    job_id = eager(world)
    with world.database.transaction() as conn:
        steering.pause(conn, job_id, kind="user", reason="paused by the user")
        loading.end(conn, job_id)

    assert (now(world, job_id).state, now(world, job_id).loaded) == (JobState.PAUSED, True)


def test_a_loader_that_is_behind_another_takes_nothing_back(world: World) -> None:
    job_id = eager(world)
    with world.database.transaction() as conn:
        loading.note(conn, job_id, n_rows=2, n_skipped=9, skipped=[], columns=["other"])

    assert (now(world, job_id).n_rows, now(world, job_id).n_skipped) == (4, 0)


def test_a_refused_job_is_dropped_with_all_its_rows_and_an_open_one_is_not(world: World) -> None:
    refused = world.loading(key="r")
    with world.database.transaction() as conn:
        payload_store.add_payloads(conn, refused, [(0, 4, b"requests", b"inputs", "digest 0")])
    opened = eager(world)
    with world.database.transaction() as conn:
        dropped = loading.drop(conn, refused), loading.drop(conn, opened), loading.drop(conn, refused)
        left = conn.execute(select(payload.c.job_id)).scalars().all()

    assert dropped == (True, False, False)
    assert left == [opened]
    with pytest.raises(JobError):
        now(world, refused)


@pytest.mark.parametrize(("key", "state"), [(None, JobState.FAILED), ("k", JobState.LOADING)])
def test_a_loading_job_that_is_long_silent_stays_for_its_key_only(
    world: World, key: str | None, state: JobState
) -> None:
    job_id = world.loading(key=key)
    with world.database.transaction() as conn:
        loading.beat(conn, job_id, "here:1")
        silence(conn, loading.FORGOTTEN_MS + 1)
        loading.sweep(conn)

    assert now(world, job_id).state is state
