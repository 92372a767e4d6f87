"""A clean job breaks no invariant; each invariant finds the fault that is planted for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from batchmill_core.errors import CallState, JobError
from batchmill_core.job import Rows
from batchmill_core.request import RowStatus
from batchmill_db import jobs, payload_store, reaping
from batchmill_db.verify import BILL_INVARIANTS, INVARIANTS, BillLine, Violation, as_lines, verify
from tests.conformance.db.world import BOUND, COST, World, answered, child, ended, settled

N_ROWS = 9


@pytest.fixture
def job_id(world: World) -> int:
    """A finished job with all that can happen: a shared call, a retry, a dead row, a void and an unknown call."""
    job_id = world.job(sizes=(4, 4, 1), budget=100 * BOUND)
    _answer_together(world, job_id)
    _answer_with_trouble(world, job_id)
    for _ in range(reaping.CRASH_LIMIT):
        world.reserve(world.take(job_id), [1])
        world.crash()
    world.finish()
    (retried,) = world.retry(job_id, [RowStatus.FAILED])
    claim = world.claim(retried)
    assert claim is not None
    world.reserve(claim, [1])
    world.save(claim, 1, [answered(5, 1, replaces=RowStatus.FAILED)], [settled(1, request_id="retried")], releases=True)
    world.finish()
    return job_id


def _answer_together(world: World, job_id: int) -> None:
    claim = world.take(job_id)
    world.reserve(claim, [1], rows=[Rows.span(0, 4)])
    rows = [answered(n, 1, embedding=b"\x00" * 8, cost_nanousd=COST // 4) for n in range(4)]
    world.save(claim, 1, rows, [settled(1, request_id="shared")], releases=True)


def _answer_with_trouble(world: World, job_id: int) -> None:
    claim = world.take(job_id)
    world.reserve(claim, range(1, 7), rows=[Rows.of([n]) for n in (4, 4, 5, 6, 7, 7)])
    ends = [ended(1, CallState.VOID), *(settled(s, request_id=f"call {s}") for s in (2, 3, 4))]
    rows = [answered(4, 2), answered(5, 3, RowStatus.FAILED), answered(6, 4)]
    world.save(claim, 1, rows, [*ends, ended(5, CallState.UNKNOWN)])
    world.save(claim, 2, (), [settled(6, request_id="call 6", cost=0)], children=[child([7])], releases=True)
    last = world.claim(world.chunks(job_id, state="ready")[-1]["id"])
    assert last is not None
    world.reserve(last, [1])
    row = answered(7, 1, calls=3, cost_nanousd=COST, unknown_nanousd=BOUND)
    world.save(last, 1, [row], [settled(1, request_id="last")], releases=True)


BILL = [BillLine(request_id=i, cost_nanousd=COST) for i in ("shared", "call 2", "call 3", "call 4", "retried", "last")]


def check(world: World, job_id: int, bill: list[BillLine] | None = None) -> list[Violation]:
    with world.database.reading() as conn:
        return verify(conn, job_id, bill=bill)


def test_a_clean_job_breaks_nothing(world: World, job_id: int) -> None:
    job = world.get(job_id)

    assert (job.by_status[RowStatus.OK], job.by_status[RowStatus.DEAD], job.done) == (8, 1, N_ROWS)
    assert as_lines(check(world, job_id, BILL)) == []


def test_a_job_that_runs_breaks_nothing(world: World) -> None:
    job_id = world.job(sizes=(4, 4), budget=100 * BOUND)
    claim = world.take(job_id)
    world.reserve(claim, [1, 2])
    world.save(claim, 1, [answered(0, 1)], [settled(1)])

    assert as_lines(check(world, job_id)) == []


def test_a_job_that_is_not_there_cannot_be_verified(world: World) -> None:
    with pytest.raises(JobError, match="no job number 7"):
        check(world, 7)


def sql(*statements: str) -> Callable[[World], None]:
    def plant(world: World) -> None:
        with world.database.transaction() as conn:
            for s in statements:
                conn.execute(text(s))

    return plant


def call_line(world: World, **more: Any) -> None:
    """One more line in the ledger, like the first of the second chunk."""
    with world.database.transaction() as conn:
        line = dict(conn.execute(text("SELECT * FROM call WHERE chunk_id = 2 AND seq = 2")).one()._mapping) | more
        names = ", ".join(f'"{n}"' for n in line)
        conn.execute(text(f"INSERT INTO call ({names}) VALUES ({', '.join(':' + n for n in line)})"), line)


PLANTED: dict[str, Callable[[World], None]] = {
    "every_row_has_one_final_status": sql('DELETE FROM result WHERE "row" = 6'),
    "no_result_is_beyond_the_last_row": sql("UPDATE job SET n_rows = 7"),
    "every_result_has_its_payload": sql("DELETE FROM payload WHERE first_row = 4"),
    "payloads_follow_each_other": sql("UPDATE payload SET n_rows = 3 WHERE first_row = 0"),
    "payloads_hold_every_row": sql("UPDATE payload SET n_rows = 2 WHERE first_row = 8"),
    "an_ended_job_has_no_work_left": sql("UPDATE chunk SET state = 'ready' WHERE id = 1"),
    "no_row_is_in_two_chunks": sql(
        "UPDATE chunk SET state = 'ready' WHERE id IN (1, 2)", "UPDATE chunk SET rows = '0-3'"
    ),
    "chunks_describe_their_rows": sql("UPDATE chunk SET n_rows = 2 WHERE state = 'dead'"),
    "leases_are_of_leased_chunks": sql("UPDATE chunk SET lease_owner = 'w1' WHERE id = 1"),
    "every_result_has_its_attempt": sql('UPDATE result SET fence = 9 WHERE "row" = 6'),
    "no_chunk_is_of_a_later_round": sql("UPDATE job SET round = 1"),
    "results_are_answers": sql("UPDATE result SET status = 'dead' WHERE \"row\" = 6"),
    "embeddings_are_whole": sql('UPDATE result SET embedding = substr(embedding, 1, 7) WHERE "row" = 0'),
    "counters_are_the_results": sql("UPDATE chunk SET n_ok = n_ok + 1 WHERE id = 1"),
    "the_job_counts_what_its_chunks_count": sql("UPDATE job SET output_tokens = output_tokens - 1"),
    "chunks_count_what_the_ledger_says": sql("UPDATE chunk SET wasted_nanousd = 1 WHERE id = 1"),
    "a_budget_holds_what_the_ledger_says": sql("UPDATE job SET held_nanousd = held_nanousd - 1"),
    "a_budget_is_kept": sql("UPDATE job SET budget_nanousd = held_nanousd - 1"),
    "ledger_lines_are_whole": sql("UPDATE call SET settled_ms = NULL WHERE chunk_id = 2 AND seq = 2"),
    "no_call_outlives_its_attempt": lambda w: call_line(
        w, seq=99, state="reserved", settled_ms=None, cost_nanousd=None
    ),
    "every_call_has_its_chunk": lambda w: call_line(w, fence=9),
    "a_result_costs_what_its_calls_cost": sql('UPDATE result SET cost_nanousd = 0 WHERE "row" = 6'),
    "a_result_has_its_calls": sql('UPDATE result SET calls = 2 WHERE "row" = 4'),
}


def test_every_invariant_has_a_fault_that_is_planted_for_it() -> None:
    assert set(PLANTED) == set(INVARIANTS)
    assert set(WRONG_BILLS) == set(BILL_INVARIANTS)


@pytest.mark.parametrize("name", sorted(INVARIANTS))
def test_a_planted_fault_is_found(world: World, job_id: int, name: str) -> None:
    PLANTED[name](world)

    found = {v.name: v for v in check(world, job_id)}

    assert name in found
    assert found[name].detail.startswith("broken ")
    assert "=" in found[name].example


WRONG_BILLS: dict[str, list[BillLine]] = {
    "every_billed_call_is_in_the_ledger": [*BILL, *(BillLine(request_id=f"lost {n}", row=4) for n in range(3))],
    "no_call_is_in_the_ledger_twice": BILL,
    "the_ledger_agrees_with_the_bill": [BillLine(request_id=b.request_id, cost_nanousd=COST + 1) for b in BILL],
}


@pytest.mark.parametrize("name", sorted(BILL_INVARIANTS))
def test_a_bill_that_differs_is_found(world: World, job_id: int, name: str) -> None:
    if name == "no_call_is_in_the_ledger_twice":
        call_line(world, seq=99)

    found = {v.name for v in check(world, job_id, WRONG_BILLS[name])}

    assert name in found


def test_a_billed_call_whose_answer_never_came_is_covered_by_the_open_line_of_its_row(
    world: World, job_id: int
) -> None:
    answerless = [BillLine(request_id="cut", row=7, cost_nanousd=COST)]

    assert as_lines(check(world, job_id, [*BILL, *answerless])) == []


def test_a_call_that_was_settled_and_not_billed_is_found(world: World, job_id: int) -> None:
    found = check(world, job_id, BILL[1:])

    assert [v.name for v in found] == ["the_ledger_agrees_with_the_bill"]
    assert "shared" in found[0].example


def test_lost_rows_are_found_at_each_place(world: World) -> None:
    job_id = world.job(sizes=(3, 3))
    for _ in range(2):
        world.answer_all(world.take(job_id))
    world.finish()

    found = []
    for lost in (0, 3, 5):
        with world.database.transaction() as conn:
            row = {"row": lost}
            conn.execute(text('UPDATE result SET "row" = "row" + 100 WHERE "row" = :row'), row)
            found.append(next(v.example for v in verify(conn, job_id) if v.name == "every_row_has_one_final_status"))
            conn.execute(text('UPDATE result SET "row" = "row" - 100 WHERE "row" > 99'))
    with world.database.transaction() as conn:
        conn.execute(text("DELETE FROM result"))
        found.append(next(v.detail for v in verify(conn, job_id) if v.name == "every_row_has_one_final_status"))

    assert found[:3] == ["row=0", "row=3", "row=5"]
    assert found[3].startswith("broken 6 times")


def test_a_job_without_rows_breaks_nothing(world: World) -> None:
    job_id = world.job(sizes=())
    world.finish()

    assert as_lines(check(world, job_id)) == []


def test_a_job_that_failed_to_load_breaks_nothing(world: World) -> None:
    job_id = world.loading()
    with world.database.transaction() as conn:
        payload_store.add_payloads(conn, job_id, [(0, 2, b"r", b"i", "d")])
        jobs.fail_loading(conn, job_id, "line 3 is not JSON")

    assert as_lines(check(world, job_id)) == []
