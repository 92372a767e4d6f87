"""The ledger: reserved before, settled after, each call once; a budget is never passed."""

from __future__ import annotations

import pytest

from batchmill_core.errors import CallState
from batchmill_core.job import JobState, Rows
from batchmill_core.usage import Usage
from batchmill_db import booking, costs, jobs, ledger, past_calls, steering
from batchmill_db.booking import Refusal, Reservation
from batchmill_db.ledger import CallEnd
from batchmill_db.verify import verify
from tests.conformance.db.world import BOUND, COST, USAGE, World, call_of, child, ended, settled


def held(world: World, job_id: int) -> int:
    return world.get(job_id).held_nanousd


def settle(world: World, job_id: int, fence: int, ends: list[CallEnd], *, budgeted: bool = True) -> list[ledger.Move]:
    chunk_id = world.chunks(job_id)[0]["id"]
    with world.database.transaction() as conn:
        return ledger.settle(conn, chunk_id=chunk_id, fence=fence, job_id=job_id, ends=ends, budgeted=budgeted)


def test_a_reservation_writes_a_line_per_call(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)

    reservation = world.reserve(claim, [1, 2], rows=[Rows.of([0]), Rows.of([1, 3])])

    assert reservation == Reservation(accepted=2)
    lines = [(c["seq"], c["state"], c["first_row"], c["last_row"], c["rows"]) for c in world.calls(job_id)]
    assert lines == [(1, "reserved", 0, 0, None), (2, "reserved", 1, 3, "1,3")]


def test_a_repeated_reservation_is_accepted_and_held_once(world: World) -> None:
    job_id = world.job(budget=10 * BOUND)
    claim = world.take(job_id)

    reservations = [world.reserve(claim, [1, 2]) for _ in range(2)]

    assert [r.accepted for r in reservations] == [2, 2]
    assert (len(world.calls(job_id)), held(world, job_id)) == (2, 2 * BOUND)


def test_as_many_calls_are_reserved_as_fit_the_budget(world: World) -> None:
    job_id = world.job(budget=2 * BOUND + 1)
    claim = world.take(job_id)

    reservation = world.reserve(claim, [1, 2, 3])

    assert reservation == Reservation(accepted=2, refusal=Refusal(reason="budget"))
    assert held(world, job_id) == 2 * BOUND


def test_an_attempt_that_lost_its_chunk_reserves_nothing(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.crash()

    reservation = world.reserve(claim, [1])

    assert reservation == Reservation(accepted=0, refusal=Refusal(reason="lost"))


def test_an_attempt_that_ended_reserves_nothing(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.release(claim)

    reservation = world.reserve(claim, [1])

    assert reservation == Reservation(accepted=0, refusal=Refusal(reason="lost"))


def test_a_paused_job_reserves_nothing(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    with world.database.transaction() as conn:
        steering.pause(conn, job_id, kind="user", reason="lunch")

    reservation = world.reserve(claim, [1])

    assert reservation == Reservation(accepted=0, refusal=Refusal(reason="stopped", job_state=JobState.PAUSED))


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (settled(1), COST),
        (settled(1, cost=0), 0),
        (settled(1, cost=None), BOUND),
        (ended(1, CallState.UNKNOWN), BOUND),
        (ended(1, CallState.VOID), 0),
    ],
    ids=["settled", "free", "cost unknown", "unknown", "void"],
)
def test_settling_frees_what_a_call_did_not_cost_once(world: World, end: CallEnd, left: int) -> None:
    job_id = world.job(budget=10 * BOUND)
    claim = world.take(job_id)
    world.reserve(claim, [1])

    moved = [len(settle(world, job_id, claim.fence, [end])) for _ in range(2)]

    assert moved == [1, 0]
    assert held(world, job_id) == left


def test_a_call_that_was_given_up_is_settled_when_it_comes_back(world: World) -> None:
    job_id = world.job(budget=10 * BOUND)
    claim = world.take(job_id)
    world.reserve(claim, [1])
    world.crash()
    given_up = (world.calls(job_id)[0]["state"], held(world, job_id))

    settle(world, job_id, claim.fence, [settled(1)])

    assert given_up == ("unknown", BOUND)
    assert (world.calls(job_id)[0]["state"], held(world, job_id)) == ("settled", COST)


def test_a_void_call_never_becomes_anything_else(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])
    settle(world, job_id, claim.fence, [ended(1, CallState.VOID)], budgeted=False)

    settle(world, job_id, claim.fence, [settled(1)], budgeted=False)

    assert world.calls(job_id)[0]["state"] == "void"


def test_a_call_that_was_never_booked_settles_nothing(world: World) -> None:
    job_id = world.job(budget=BOUND)
    claim = world.take(job_id)

    moved = settle(world, job_id, claim.fence, [settled(1)])

    assert (moved, held(world, job_id)) == ([], 0)


def test_a_release_gives_up_the_calls_it_leaves_open(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1])

    world.release(claim)

    (line,) = world.calls(job_id)
    assert (line["state"], line["error_kind"], line["bound_nanousd"]) == ("unknown", "released", BOUND)
    assert world.get(job_id).unknown_nanousd == BOUND


def test_giving_up_the_calls_of_an_attempt_twice_counts_them_once(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1, 2])

    with world.database.transaction() as conn:
        times = [ledger.orphan(conn, claim.chunk_id, claim.fence) for _ in range(2)]

    assert times == [2, 0]
    assert world.get(job_id).unknown_calls == 2


def test_a_budget_that_comes_later_holds_what_was_spent_before(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1, 2, 3])
    world.save(claim, 1, (), [settled(1), ended(2, CallState.VOID)])
    with world.database.transaction() as conn:
        steering.pause(conn, job_id, kind="user", reason="too dear")
        steering.resume(conn, job_id, budget_nanousd=COST + BOUND)
    before = held(world, job_id)

    reservation = world.reserve(claim, [4], rows=[Rows.of([3])])
    world.save(claim, 2, (), [settled(3)])

    assert before == COST + BOUND
    assert reservation.refusal == Refusal(reason="budget")
    assert held(world, job_id) == 2 * COST


def test_a_job_is_paused_for_its_budget_only_when_nothing_is_in_flight(world: World) -> None:
    job_id = world.job(budget=BOUND)
    claim = world.take(job_id)
    world.reserve(claim, [1])
    with world.database.transaction() as conn:
        in_flight = steering.pause_if_spent(conn, job_id, BOUND)
    world.save(claim, 1, (), [settled(1)])

    with world.database.transaction() as conn:
        fits = steering.pause_if_spent(conn, job_id, BOUND - COST)
        spent = steering.pause_if_spent(conn, job_id, BOUND)

    assert (in_flight, fits, spent) == (False, False, True)
    job = world.get(job_id)
    assert (job.state, job.reason_kind) == (JobState.PAUSED, "budget")
    assert "$0.000001" in (job.reason or "")


def test_the_past_of_a_row_is_its_calls_of_this_round_that_may_have_cost(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    world.reserve(claim, [1, 2, 3, 4], rows=[Rows.of([0])] * 4)
    ends = [settled(1), settled(2, cost=20), ended(3, CallState.UNKNOWN), ended(4, CallState.VOID)]
    world.save(claim, 1, (), ends)

    with world.database.reading() as conn:
        past = past_calls.past_of(conn, job_id, Rows.span(0, 4), 1)
        next_round = past_calls.past_of(conn, job_id, Rows.span(0, 4), 2)

    assert next_round == {}
    assert past == {
        0: past_calls.Past(tries=3, calls=3, cost_nanousd=COST + 20, unknown_nanousd=BOUND, usage=USAGE + USAGE)
    }


def test_the_past_of_a_row_has_its_share_of_a_call_for_many_rows(world: World) -> None:
    job_id = world.job(sizes=(3, 3))
    claim = world.take(job_id)
    world.reserve(claim, [1], rows=[Rows.of([0, 1, 2])])
    world.save(claim, 1, (), [settled(1, cost=100, usage=Usage(input=10))])

    with world.database.reading() as conn:
        past = past_calls.past_of(conn, job_id, Rows.of([1, 2, 4]), 1)

    assert past == {
        1: past_calls.Past(tries=1, calls=1, cost_nanousd=33, usage=Usage(input=3)),
        2: past_calls.Past(tries=1, calls=1, cost_nanousd=33, usage=Usage(input=3)),
    }


def test_the_past_of_scattered_rows_leaves_out_the_rows_between(world: World) -> None:
    job_id = world.job(sizes=(60,))
    claim = world.take(job_id)
    world.reserve(claim, range(1, 61))
    world.save(claim, 1, (), [settled(s) for s in range(1, 61)])

    with world.database.reading() as conn:
        past = past_calls.past_of(conn, job_id, Rows.of(range(0, 60, 3)), 1)

    assert sorted(past) == list(range(0, 60, 3))


@pytest.fixture
def spent(world: World) -> World:
    """Two jobs: one with a settled, a wasted and an unknown call, one with a reserved call."""
    first, second = world.job(name="first"), world.job(name="second")
    claim = world.take(first)
    world.reserve(claim, [1, 2, 3])
    world.save(claim, 1, (), [settled(1), settled(2, wasted=True), ended(3, CallState.UNKNOWN)])
    world.reserve(world.take(second, "w2"), [1])
    return world


@pytest.mark.parametrize("by", [None, *costs.BY])
def test_spending_by_each_key_adds_up_to_the_same(spent: World, by: str | None) -> None:
    with spent.database.reading() as conn:
        groups = costs.spending(conn, by=by)

    assert sum(g.settled_nanousd for g in groups) == 2 * COST
    assert sum(g.wasted_nanousd for g in groups) == COST
    assert sum(g.unknown_nanousd for g in groups) == sum(g.reserved_nanousd for g in groups) == BOUND
    assert (sum(g.calls for g in groups), sum(g.unknown_calls for g in groups)) == (4, 1)
    assert sum(g.input_tokens for g in groups) == 80


def test_spending_names_its_keys(spent: World) -> None:
    with spent.database.reading() as conn:
        keys = {by: [g.key for g in costs.spending(conn, by=by)] for by in costs.BY}
        public = {jobs.find(conn, name).public_id for name in ("first", "second")}

    assert (keys["account"], keys["model"], keys["worker"]) == (["acme"], ["small"], ["host/w1"])
    assert set(keys["job"]) == public
    assert [len(day) for day in keys["day"]] == [len("2026-01-01")]


def test_spending_of_one_job_leaves_out_the_others(spent: World) -> None:
    with spent.database.reading() as conn:
        (one,) = costs.spending(conn, job_id=jobs.find(conn, "second").id)

    assert (one.calls, one.reserved_nanousd, one.settled_nanousd) == (1, BOUND, 0)


def test_spending_of_an_empty_ledger_is_zero(world: World) -> None:
    with world.database.reading() as conn:
        total, grouped = costs.spending(conn), costs.spending(conn, by="model")

    assert (total, grouped) == ([costs.Spending()], [])


def test_a_removed_job_keeps_its_costs_in_the_ledger(world: World) -> None:
    job_id = world.job()
    world.answer_all(world.take(job_id))
    world.finish()
    with world.database.transaction() as conn:
        jobs.remove(conn, job_id)

    with world.database.reading() as conn:
        (group,) = costs.spending(conn, by="job")

    assert (group.key, group.settled_nanousd) == ("removed", 4 * COST)


def test_chunks_made_after_a_job_was_removed_never_meet_its_ledger(world: World) -> None:
    job_id = world.job()
    world.answer_all(world.take(job_id))
    world.finish()
    with world.database.transaction() as conn:
        jobs.remove(conn, job_id)
    again = world.job()

    world.answer_all(world.take(again))

    assert len(world.calls(again)) == 4
    with world.database.reading() as conn:
        assert verify(conn, again) == []


def test_a_call_without_a_price_has_no_bound_and_is_told_so(world: World) -> None:
    job_id = world.job()
    claim = world.take(job_id)
    with world.database.transaction() as conn:
        booking.reserve(conn, [call_of(claim, 1, Rows.of([0]), bound=None)], budgeted=False)
    world.save(claim, 1, (), [ended(1, CallState.UNKNOWN)], children=[child([0])], releases=True)

    with world.database.reading() as conn:
        (total,) = costs.spending(conn)

    assert (total.unknown_nanousd, total.unknown_calls, total.unbounded) == (0, 1, 1)
