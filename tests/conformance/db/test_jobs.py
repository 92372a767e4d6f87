"""A job's states, its rounds, its payloads and its counters."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError

from batchmill_core.errors import JobError
from batchmill_core.job import JOB_TRANSITIONS, JobState, Rows
from batchmill_core.request import RowStatus
from batchmill_db import chunks, jobs, payload_store, reaping, rounds, schema, steering
from batchmill_db.jobs import NewJob
from batchmill_db.verify import verify
from tests.conformance.db.world import COST, QUEUE, World, answered, child, settled, spec


def test_a_new_job_is_loading_and_knows_what_it_was_given(world: World) -> None:
    with world.database.transaction() as conn:
        job_id = jobs.create(
            conn,
            NewJob(name="reviews", model="small", spec=spec(), key="k", priority=2, submission={"prompt": "Say hi."}),
        )
        job = jobs.get(conn, job_id)

    assert (job.state, job.round, job.key, job.priority, job.loaded) == (JobState.LOADING, 1, "k", 2, False)
    assert job.submission == {"prompt": "Say hi."}
    assert len(job.public_id) == 8
    assert job.done == 0


def test_two_jobs_cannot_have_one_key(world: World) -> None:
    world.loading(key="k")

    with pytest.raises(IntegrityError):
        world.loading(key="k")


def test_a_job_is_found_by_id_then_key_then_newest_name(world: World) -> None:
    old, new = world.loading(name="reviews"), world.loading(name="reviews")
    keyed = world.loading(name="other", key="reviews-2026")
    named_like_a_key = world.loading(name="reviews-2026")

    with world.database.reading() as conn:
        public_id = jobs.get(conn, old).public_id
        found = [jobs.find(conn, r).id for r in (public_id, "reviews", "reviews-2026")]
        by_key = [jobs.by_key(conn, k) for k in ("reviews-2026", "none")]
        newest = [j.id for j in jobs.newest(conn, limit=2)]

    assert found == [old, new, keyed]
    assert [j and j.id for j in by_key] == [keyed, None]
    assert newest == [named_like_a_key, keyed]


def test_a_job_that_is_not_there_is_named_in_the_error(world: World) -> None:
    with world.database.reading() as conn:
        with pytest.raises(JobError, match=r"no job 'reviews'.*batchmill jobs"):
            jobs.find(conn, "reviews")
        with pytest.raises(JobError, match="no job number 7"):
            jobs.get(conn, 7)


def test_a_loaded_job_is_open_once(world: World) -> None:
    job_id = world.loading()

    with world.database.transaction() as conn:
        did = [jobs.mark_loaded(conn, job_id) for _ in range(2)]

    job = world.get(job_id)
    assert did == [True, False]
    assert (job.state, job.loaded, job.opened_ms is not None) == (JobState.OPEN, True, True)


def test_loading_that_fails_drops_what_was_loaded_and_can_begin_again(world: World) -> None:
    job_id = world.loading()
    with world.database.transaction() as conn:
        payload_store.add_payloads(conn, job_id, [(0, 2, b"r", b"i", "d")])
        chunks.add(conn, job_id, [chunks.NewChunk(rows=Rows.span(0, 2), queue=QUEUE)])
        for _ in range(2):
            jobs.fail_loading(conn, job_id, "line 3 is not JSON")
        failed = jobs.get(conn, job_id)
        left = list(payload_store.payload_digests(conn, job_id))
        jobs.reload(conn, job_id)
        again = jobs.get(conn, job_id)

    assert (failed.state, failed.reason_kind, failed.reason, left) == ("failed", "source", "line 3 is not JSON", [])
    assert (again.state, again.reason, again.finished_ms) == (JobState.LOADING, None, None)
    assert world.chunks(job_id) == []


def test_a_job_that_is_open_cannot_fail_to_load(world: World) -> None:
    job_id = world.job()

    with world.database.transaction() as conn:
        jobs.fail_loading(conn, job_id, "too late")

    assert world.get(job_id).state == JobState.OPEN
    assert world.states(job_id) == ["ready"]


def test_the_first_reason_of_a_pause_stays(world: World) -> None:
    job_id = world.job()

    with world.database.transaction() as conn:
        did = [steering.pause(conn, job_id, kind=kind, reason=f"by {kind}") for kind in ("budget", "user")]

    job = world.get(job_id)
    assert did == [True, False]
    assert (job.state, job.reason_kind, job.reason) == (JobState.PAUSED, "budget", "by budget")


def test_resume_opens_a_paused_job_and_answers_what_it_was(world: World) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        steering.pause(conn, job_id, kind="user", reason="lunch")

    with world.database.transaction() as conn:
        before = [steering.resume(conn, job_id, budget_nanousd=9) for _ in range(2)]

    job = world.get(job_id)
    assert before == [JobState.PAUSED, JobState.OPEN]
    assert (job.state, job.reason, job.budget_nanousd) == (JobState.OPEN, None, 9)


@pytest.mark.parametrize("state", [s for s in JobState if s not in (JobState.OPEN, JobState.PAUSED)])
def test_resume_refuses_a_job_that_is_neither_open_nor_paused(world: World, state: JobState) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        conn.execute(schema.job.update().values(state=state))

    with world.database.transaction() as conn, pytest.raises(JobError, match=state):
        steering.resume(conn, job_id)


@pytest.mark.parametrize("state", list(JobState))
def test_cancel_follows_the_transition_table(world: World, state: JobState) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        conn.execute(schema.job.update().values(state=state))
    allowed = JobState.CANCELLED in JOB_TRANSITIONS[state] or state is JobState.CANCELLED

    with world.database.transaction() as conn:
        if allowed:
            assert steering.cancel(conn, job_id) == state
        else:
            with pytest.raises(JobError, match=f"is {state}; it cannot become cancelled"):
                steering.cancel(conn, job_id)

    assert (world.get(job_id).state is JobState.CANCELLED) == allowed


def test_cancel_ends_ready_chunks_and_leaves_leased_ones_to_their_workers(world: World) -> None:
    job_id = world.job(sizes=(2, 2))
    claim = world.take(job_id)
    with world.database.transaction() as conn:
        for _ in range(2):
            steering.cancel(conn, job_id)
    before = world.states(job_id)

    world.release(claim, [child([0, 1])])

    assert before == ["leased", "cancelled"]
    assert world.states(job_id) == ["done", "cancelled", "cancelled"]


def test_a_job_is_done_when_nothing_is_ready_or_leased(world: World) -> None:
    job_id = world.job(sizes=(2, 2))
    answers = [world.finish()]
    world.answer_all(world.take(job_id))
    claim = world.take(job_id)
    answers.append(world.finish())
    world.answer_all(claim)

    answers += [world.finish(), world.finish()]

    assert answers == [[], [], [job_id], []]
    with world.database.reading() as conn:
        job = jobs.get(conn, job_id)
    assert (job.state, job.done, job.cost_nanousd) == (JobState.DONE, 4, 4 * COST)
    assert job.first_claim_ms is not None
    assert job.last_save_ms is not None
    assert job.first_claim_ms <= job.last_save_ms <= (job.finished_ms or 0)


def test_a_job_that_is_paused_or_not_loaded_is_not_done(world: World) -> None:
    paused = world.job(sizes=())
    world.loading()
    with world.database.transaction() as conn:
        steering.pause(conn, paused, kind="user", reason="lunch")

    assert world.finish() == []


def test_a_done_job_opens_its_next_round_once(world: World) -> None:
    job_id = world.job()
    world.answer_all(world.take(job_id))
    world.finish()

    with world.database.transaction() as conn:
        did = [rounds.reopen(conn, job_id, 2) for _ in range(2)]

    job = world.get(job_id)
    assert did == [True, False]
    assert (job.state, job.round, job.finished_ms) == (JobState.OPEN, 2, None)


def test_each_round_keeps_its_own_spec(world: World) -> None:
    job_id = world.loading()
    other = type(spec())(task=spec().task, steps=spec().steps, params={"temperature": 1})

    with world.database.transaction() as conn:
        rounds.add_round(conn, job_id, 2, other, statuses=["failed"])
        specs = [rounds.spec_of(conn, job_id, n) for n in (1, 2)]
        rounds.set_first_spec(conn, job_id, other)
        replaced = rounds.spec_of(conn, job_id, 1)

    assert specs == [spec(), other]
    assert replaced == other


def test_rows_to_retry_are_those_of_the_statuses_and_the_dead(world: World) -> None:
    job_id = world.job(sizes=(4, 1))
    claim = world.take(job_id)
    statuses = [RowStatus.OK, RowStatus.FAILED, RowStatus.INVALID, RowStatus.FAILED]
    world.reserve(claim, [1, 2, 3, 4])
    rows = [answered(n, n + 1, s) for n, s in enumerate(statuses)]
    world.save(claim, 1, rows, [settled(s) for s in (1, 2, 3, 4)], releases=True)
    for _ in range(reaping.CRASH_LIMIT):
        world.take(job_id)
        world.crash()

    with world.database.reading() as conn:
        found = {s: str(rounds.rows_of_status(conn, job_id, [s])) for s in (*statuses, RowStatus.DEAD)}
        both = rounds.rows_of_status(conn, job_id, [RowStatus.DEAD, RowStatus.INVALID])

    assert found == {RowStatus.OK: "0", RowStatus.FAILED: "1,3", RowStatus.INVALID: "2", RowStatus.DEAD: "4"}
    assert str(both) == "2,4"


@pytest.mark.parametrize("state", ["loading", "open", "paused"])
def test_a_job_that_runs_cannot_be_removed(world: World, state: str) -> None:
    job_id = world.job()
    with world.database.transaction() as conn:
        conn.execute(schema.job.update().values(state=state))

    with world.database.transaction() as conn, pytest.raises(JobError, match="cancel it before"):
        jobs.remove(conn, job_id)


def test_removing_a_job_leaves_only_its_ledger(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1, 2])
    world.save(claim, 1, [answered(0, 1)], [settled(1)])

    with world.database.transaction() as conn:
        steering.cancel(conn, job_id)
        jobs.remove(conn, job_id)

    for table in (schema.job, schema.chunk, schema.payload, schema.result, schema.round_):
        assert world.table(table) == []
    assert [c["state"] for c in world.calls(job_id)] == ["settled", "unknown"]


def test_payloads_are_added_once_and_told_in_row_order(world: World) -> None:
    job_id = world.loading()
    first, second = (0, 2, b"r", b"i", "a"), (2, 3, b"r", b"i", "b")

    with world.database.transaction() as conn:
        new = [payload_store.add_payloads(conn, job_id, p) for p in ([second], [first, second])]
        digests = list(payload_store.payload_digests(conn, job_id))

    assert new == [{2}, {0}]
    assert digests == [(0, 2, "a"), (2, 3, "b")]


def test_payloads_are_found_by_any_of_their_rows(world: World) -> None:
    job_id = world.job(sizes=(10,) * 40)

    with world.database.reading() as conn:
        found = {
            str(rows): [first for first, _, _ in payload_store.requests_of(conn, job_id, rows)]
            for rows in (Rows.of([0]), Rows.of([9, 10]), Rows.span(15, 20), Rows.of([399]), Rows.of([5, 205]))
        }
        scattered = payload_store.requests_of(conn, job_id, Rows.of(range(0, 400, 3)))

    assert found == {"0": [0], "9-10": [0, 10], "15-34": [10, 20, 30], "399": [390], "5,205": [0, 200]}
    assert [first for first, _, _ in scattered] == list(range(0, 400, 10))


def test_inputs_follow_each_other_to_the_end(world: World) -> None:
    job_id = world.job(sizes=(2, 3))

    with world.database.reading() as conn:
        found = [payload_store.inputs_after(conn, job_id, row) for row in (0, 2, 5)]

    assert found == [(0, 2, b"inputs"), (2, 3, b"inputs"), None]


def test_progress_of_loading_is_kept(world: World) -> None:
    job_id = world.loading()

    with world.database.transaction() as conn:
        jobs.set_progress(conn, job_id, n_rows=5, n_skipped=1, skipped=[{"line": 3}], columns=["a", "b"])

    job = world.get(job_id)
    assert (job.n_rows, job.n_skipped, job.skipped, job.columns) == (5, 1, [{"line": 3}], ["a", "b"])


def test_states_are_told_for_the_jobs_asked_for(world: World) -> None:
    first, second = world.job(), world.loading()
    world.loading()

    with world.database.reading() as conn:
        assert jobs.states(conn, [first, second]) == {first: JobState.OPEN, second: JobState.LOADING}


def test_summing_twice_counts_once_and_late_counts_reach_a_job_that_has_ended(world: World) -> None:
    job_id = world.job(sizes=(2, 2))
    stale = world.take(job_id)
    world.reserve(stale, [1, 2])
    world.crash()
    for _ in range(2):
        world.answer_all(world.take(job_id))
    world.finish()
    before = [world.get(job_id).cost_nanousd for _ in range(2)]

    world.save(stale, 1, (), [settled(1), settled(2)])

    assert before == [4 * COST, 4 * COST]
    assert world.get(job_id).cost_nanousd == 6 * COST
    with world.database.reading() as conn:
        assert verify(conn, job_id) == []
