"""The fenced save: one result per row and round, every call counted once, whoever saves when."""

from __future__ import annotations

import pytest

from batchmill_core.errors import CallState
from batchmill_core.job import Rows
from batchmill_core.request import RowStatus
from batchmill_db import jobs, results, saved_results, steering
from batchmill_db.chunks import Claim
from batchmill_db.verify import as_lines, verify
from tests.conformance.db.world import BOUND, COST, World, answered, child, ended, settled


def violations(world: World, job_id: int) -> list[str]:
    with world.database.reading() as conn:
        return as_lines(verify(conn, job_id))


def lost_lease(world: World, job_id: int) -> Claim:
    """An attempt whose lease ran out after it had booked a call for each of its rows."""
    claim = world.take(job_id)
    world.reserve(claim, range(1, len(claim.rows) + 1))
    world.crash()
    return claim


def test_a_save_writes_results_settles_calls_and_counts(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    saved = world.answer_all(claim)

    job = world.get(job_id)
    assert saved == results.Saved(live=True, accepted=4)
    assert {r["status"] for r in world.results(job_id).values()} == {"ok"}
    assert [c["state"] for c in world.calls(job_id)] == ["settled"] * 4
    assert (job.by_status[RowStatus.OK], job.calls, job.cost_nanousd, job.usage.input) == (4, 4, 4 * COST, 160)
    assert violations(world, job_id) == []


def test_a_save_keeps_every_column_as_it_was_given(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])
    given = answered(
        0,
        1,
        RowStatus.INVALID,
        output="née 😀",
        embedding=b"\x00\x01\x02\x03",
        finish_reason="stop",
        error_kind="invalid",
        error="no JSON",
        raw="{",
        model="small",
        account="acme",
        unknown_nanousd=7,
        cached=True,
        sanitized=True,
        latency_ms=12,
        ttft_ms=3,
    )

    world.save(claim, 1, [given], [settled(1)])

    with world.database.reading() as conn:
        (kept,) = saved_results.between(conn, job_id, 0, 9)
    for name in ("row", "output", "embedding", "finish_reason", "error_kind", "error", "raw", "model", "account"):
        assert getattr(kept, name) == getattr(given, name)
    assert (kept.status, kept.cached, kept.sanitized, kept.round) == ("invalid", True, True, 1)
    assert (kept.latency_ms, kept.ttft_ms, kept.unknown_nanousd, kept.input_tokens) == (12, 3, 7, 40)


def test_a_save_that_is_repeated_changes_nothing(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1, 2])
    rows, ends = [answered(0, 1), answered(1, 2)], [settled(1), settled(2)]
    world.save(claim, 1, rows, ends)
    before = world.get(job_id)

    repeated = world.save(claim, 1, rows, ends)

    assert repeated == results.Saved(live=True, accepted=2)
    assert world.get(job_id) == before
    assert violations(world, job_id) == []


def test_a_save_that_released_and_is_repeated_changes_nothing(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])
    rest = [child([1, 2, 3])]
    world.save(claim, 1, [answered(0, 1)], [settled(1)], children=rest, releases=True)
    before = world.states(job_id)

    repeated = world.save(claim, 1, [answered(0, 1)], [settled(1)], children=rest, releases=True)

    assert repeated.live
    assert world.states(job_id) == before == ["done", "ready"]
    assert violations(world, job_id) == []


def test_a_save_that_is_repeated_after_the_chunk_was_reaped_counts_nothing_twice(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])
    world.save(claim, 1, [answered(0, 1)], [settled(1)])
    world.crash()
    before = world.get(job_id)

    repeated = world.save(claim, 1, [answered(0, 1)], [settled(1)])

    assert not repeated.live
    assert world.get(job_id) == before
    assert violations(world, job_id) == []


def test_the_first_result_of_a_row_stays_within_a_round(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1, 2], rows=[Rows.of([0]), Rows.of([0])])
    world.save(claim, 1, [answered(0, 1, output="first")], [settled(1)])

    second = world.save(claim, 2, [answered(0, 2, output="second")], [settled(2)])

    assert second.accepted == 0
    assert world.results(job_id)[0]["output"] == "first"
    assert world.get(job_id).wasted_nanousd == COST
    assert violations(world, job_id) == []


def test_a_row_twice_in_one_save_counts_once(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])

    world.save(claim, 1, [answered(0, 1, output="first"), answered(0, 1, output="second")], [settled(1)])

    assert world.results(job_id)[0]["output"] == "first"
    assert violations(world, job_id) == []


def test_a_stale_paid_answer_fills_an_empty_place(world: World) -> None:
    job_id = world.job()
    claim = lost_lease(world, job_id)

    saved = world.save(claim, 1, [answered(0, 1)], [settled(1)])

    job = world.get(job_id)
    assert saved == results.Saved(live=False, accepted=1)
    assert world.results(job_id)[0]["output"] == "answer 0"
    assert (job.cost_nanousd, job.wasted_nanousd, job.unknown_nanousd, job.calls) == (COST, 0, 3 * BOUND, 4)
    assert world.chunk(claim.chunk_id)["state"] == "ready"
    assert violations(world, job_id) == []


@pytest.mark.parametrize("status", [RowStatus.FAILED, RowStatus.INVALID, RowStatus.TOO_LONG])
def test_a_stale_failure_fills_nothing(world: World, status: RowStatus) -> None:
    job_id = world.job()
    claim = lost_lease(world, job_id)

    saved = world.save(claim, 1, [answered(0, 1, status)], [settled(1)])

    assert saved.accepted == 0
    assert world.results(job_id) == {}
    assert world.get(job_id).wasted_nanousd == COST
    assert violations(world, job_id) == []


def test_a_stale_answer_never_replaces_the_result_of_the_new_owner(world: World) -> None:
    job_id = world.job()
    stale = lost_lease(world, job_id)
    world.answer_all(world.take(job_id, "w2"))

    saved = world.save(stale, 1, [answered(0, 1, output="late")], [settled(1)])

    job = world.get(job_id)
    assert saved.accepted == 0
    assert world.results(job_id)[0]["output"] == "answer 0"
    assert (job.cost_nanousd, job.wasted_nanousd, job.by_status[RowStatus.OK]) == (5 * COST, COST, 4)
    assert violations(world, job_id) == []


def test_an_owner_that_finds_a_stale_answer_wastes_all_its_calls_for_that_row(world: World) -> None:
    job_id = world.job()
    stale = lost_lease(world, job_id)
    owner = world.take(job_id, "w2")
    world.reserve(owner, [1, 2], rows=[Rows.of([0]), Rows.of([0])])
    world.save(owner, 1, (), [settled(1)])  # a first try whose answer was not valid
    world.save(stale, 1, [answered(0, 1)], [settled(1)])

    saved = world.save(owner, 2, [answered(0, 2, seqs=(1, 2), calls=2, cost_nanousd=2 * COST)], [settled(2)])

    assert saved.accepted == 0
    assert world.get(job_id).wasted_nanousd == 2 * COST
    assert violations(world, job_id) == []


def test_a_stale_answer_brings_a_dead_row_back(world: World) -> None:
    job_id = world.job(sizes=(1,))
    for _ in range(2):
        world.take(job_id)
        world.crash()
    claim = lost_lease(world, job_id)
    world.finish()
    dead = world.get(job_id).by_status

    world.save(claim, 1, [answered(0, 1)], [settled(1)])

    job = world.get(job_id)
    assert (dead[RowStatus.DEAD], dead[RowStatus.OK]) == (1, 0)
    assert (job.by_status[RowStatus.DEAD], job.by_status[RowStatus.OK]) == (0, 1)
    assert violations(world, job_id) == []


@pytest.mark.parametrize("state", [CallState.VOID, CallState.UNKNOWN, CallState.SETTLED])
def test_a_call_that_ends_after_it_was_given_up_is_counted_once(world: World, state: CallState) -> None:
    job_id = world.job(budget=10 * BOUND)
    claim = lost_lease(world, job_id)
    end = settled(1) if state is CallState.SETTLED else ended(1, state)

    for _ in range(2):
        world.save(claim, 1, (), [end])

    job = world.get(job_id)
    first = {CallState.VOID: (0, 3), CallState.UNKNOWN: (0, 4), CallState.SETTLED: (COST, 3)}[state]
    assert (job.cost_nanousd, job.unknown_calls) == first
    assert violations(world, job_id) == []


def test_a_later_round_replaces_the_result_and_its_count(world: World) -> None:
    job_id = world.job()
    world.answer_all(world.take(job_id), status=RowStatus.FAILED)
    world.finish()
    (chunk_id,) = world.retry(job_id, [RowStatus.FAILED])
    claim = world.claim(chunk_id)
    assert claim is not None
    world.reserve(claim, [1])

    world.save(claim, 1, [answered(0, 1, replaces=RowStatus.FAILED)], [settled(1)])

    job = world.get(job_id)
    assert (job.by_status[RowStatus.OK], job.by_status[RowStatus.FAILED]) == (1, 3)
    assert (world.results(job_id)[0]["round"], world.results(job_id)[1]["round"]) == (2, 1)
    assert violations(world, job_id) == []


def test_an_attempt_of_an_earlier_round_writes_nothing_into_the_next(world: World) -> None:
    job_id = world.job(sizes=(1,))
    for _ in range(2):
        world.take(job_id)
        world.crash()
    stale = lost_lease(world, job_id)
    world.finish()
    world.retry(job_id, [RowStatus.DEAD])

    saved = world.save(stale, 1, [answered(0, 1)], [settled(1)])

    assert saved.accepted == 0
    assert world.get(job_id).wasted_nanousd == COST
    assert violations(world, job_id) == []


def test_a_cancelled_job_keeps_what_its_workers_had_in_flight(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])
    with world.database.transaction() as conn:
        steering.cancel(conn, job_id)

    saved = world.save(claim, 1, [answered(0, 1)], [settled(1)], children=[child([1, 2, 3])], releases=True)

    assert saved.live
    assert world.states(job_id) == ["done", "cancelled"]
    assert world.get(job_id).cost_nanousd == COST
    assert violations(world, job_id) == []


def test_a_removed_job_gets_no_results_but_its_ledger_its_costs(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])
    with world.database.transaction() as conn:
        steering.cancel(conn, job_id)
        jobs.remove(conn, job_id)

    saved = world.save(claim, 1, [answered(0, 1)], [settled(1)], releases=True)

    assert not saved.live
    assert world.results(job_id) == {}
    assert [(c["state"], c["cost_nanousd"]) for c in world.calls(job_id)] == [("settled", COST)]


def test_a_thousand_scattered_rows_are_found_finished(world: World) -> None:
    job_id = world.job(sizes=(2400,))
    claim = world.take(job_id)
    odd = Rows.of(range(1, 2400, 2))
    world.save(claim, 1, [answered(n, 0, seqs=(), calls=0, cost_nanousd=None) for n in odd])

    with world.database.reading() as conn:
        done = saved_results.finished(conn, job_id, Rows.of(n for n in range(2400) if n % 4), 1)
        later = saved_results.finished(conn, job_id, odd, 2)
        earlier = saved_results.earlier(conn, job_id, odd, 2)

    assert done == set(odd)
    assert later == set()
    assert earlier == dict.fromkeys(odd, RowStatus.OK)


def test_errors_are_told_by_kind_with_an_example(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    about = {"error_kind": "rate_limited", "error": "too fast"}
    bad = [answered(n, n, RowStatus.FAILED, **about) for n in (1, 2)]
    world.save(claim, 1, [*bad, answered(0, 0), answered(3, 3, RowStatus.REFUSED, error_kind="refused", error="no")])

    with world.database.reading() as conn:
        found = saved_results.errors_by_kind(conn, job_id)

    assert [(e.kind, e.count, e.row, e.message) for e in found] == [
        ("rate_limited", 2, 1, "too fast"),
        ("refused", 1, 3, "no"),
    ]
