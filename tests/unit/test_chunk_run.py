"""One attempt of one chunk: real SQL and event loop, an engine that the test holds in its hand."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.errors import CallTimeout, EngineLost, InvalidRequest
from batchmill_core.job import JobState, Rows, Step
from batchmill_core.request import Completion, Request, RowStatus
from batchmill_core.usage import Usage
from batchmill_db import past_calls, reaping, rounds, steering
from batchmill_db.booking import NewCall
from batchmill_db.jobs import JobRecord
from batchmill_db.session import DatabaseError
from batchmill_workers import validation
from batchmill_workers.answer import Handback, answer
from batchmill_workers.calls import bound_of, new_call, output_bound
from batchmill_workers.chunk_run import ChunkRun
from batchmill_workers.claimed import claim_and_load
from batchmill_workers.handbacks import children_of
from batchmill_workers.unit import Unit
from batchmill_workers.window import Window
from tests.mill import MODEL, QUEUE, Mill, catalog_for, milling

TIMEOUT_S = 10.0
BOUND = 94_400  # of one row "Label: x" with 20 tokens of answer, see test_the_bound_of_a_call


class HeldLane:
    """A lane with ``places`` in flight whose calls end when the test lets them."""

    embed_rows = 64
    side_by_side = 1
    book_tokens = math.inf
    pause = 0.0

    def __init__(self, *, places: int = 100, book_rows: int = 4) -> None:
        self.window = Window(100)
        self.book_rows = book_rows
        self.arrived: list[int] = []
        self.booked_together: list[int] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.gate = threading.Event()
        self.gate.set()
        self.answer: Callable[[Unit], Completion] = lambda unit: good()
        self._places = asyncio.Semaphore(places)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def line_s(self, step: Step) -> float:
        return 0.0

    def tokens_of(self, request: Request) -> int:
        return 1

    def coming(self, step: Step, tokens: Sequence[int]) -> AbstractContextManager[None]:
        self.booked_together.append(len(tokens))
        return nullcontext()

    def pause_s(self) -> float:
        return self.pause

    def describe(self) -> str | None:
        return None

    async def send(self, request: Request, step: Step, unit: Unit) -> Completion:
        async with self._places:
            unit.sending = True
            self.arrived.append(unit.items[0].row)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                while not self.gate.is_set():  # noqa: ASYNC110  # opened from the test's thread
                    await asyncio.sleep(0.001)
                return self.answer(unit)
            finally:
                self.in_flight -= 1


def good(output: int = 1) -> Completion:
    return Completion(text="yes", finish_reason="stop", usage=Usage(input=4, output=output))


class Bench:
    """A mill whose only lane is a held one."""

    def __init__(self, mill: Mill) -> None:
        self.mill = mill
        self.lane = HeldLane()

    def use(self, lane: HeldLane) -> HeldLane:
        self.lane = lane
        lanes = self.mill.process._lanes
        self.mill.process.call(lanes[QUEUE].close())
        lanes[QUEUE] = lane
        return lane

    def submit(self, rows: int = 8, **options: Any) -> JobRecord:
        return self.mill.submit([{"text": "x"}] * rows, **{"chunk_size": 1000, **options})

    def load(self, chunk_id: int = 1) -> ChunkRun:
        """An attempt that is claimed and not running."""
        process = self.mill.process
        loaded = self.mill.database.run(lambda conn: claim_and_load(conn, chunk_id, process.worker_id, 60_000))
        assert loaded is not None
        return ChunkRun(process, loaded)

    def begin(self, chunk_id: int = 1) -> threading.Thread:
        thread = threading.Thread(target=self.mill.process.run_chunk, args=(chunk_id,), daemon=True)
        thread.start()
        return thread

    def run_of(self, chunk_id: int = 1) -> ChunkRun:
        return self.mill.process.runs[chunk_id]

    def on_loop(self, act: Callable[..., None], *args: Any) -> None:
        self.mill.process.loop.call_soon_threadsafe(act, *args)


def until(happened: Callable[[], Any]) -> None:
    """Waits for another thread, at most ten seconds."""
    pause = threading.Event()
    for _ in range(5_000):
        if happened():
            return
        pause.wait(0.002)
    raise AssertionError("it did not happen")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with milling(tmp_path, catalog_for(max_retries=1), monkeypatch) as mill:
        made = Bench(mill)
        made.use(HeldLane())
        yield made


def statuses(bench: Bench, job: JobRecord) -> list[str]:
    return [r["status"] for r in bench.mill.rows(job)]


def ready(bench: Bench, job: JobRecord) -> list[tuple[str, int, bool]]:
    """(rows, step, whether it waits) of the chunks that go on."""
    chunks_ = [c for c in bench.mill.chunks(job) if c["state"] == "ready"]
    return [(c["rows"], c["step"], c["not_before_ms"] > 0) for c in chunks_]


# The usual way


def test_every_row_is_answered_and_the_words_are_for_flower(bench: Bench) -> None:
    job = bench.submit(8)
    bench.lane.answer = lambda u: replace(good(), finish_reason="length" if u.items[0].row == 3 else "stop")

    (words,) = bench.mill.run(job)

    assert words.startswith("7 ok, 1 truncated · 40 tok · $0.000026 · ")
    assert words.endswith(" rows/s")
    assert bench.mill.job(job).state is JobState.DONE
    assert bench.mill.violations(job) == []


def test_no_more_tokens_are_booked_together_than_the_rates_let_pass_within_seconds(bench: Bench) -> None:
    bench.lane.book_rows, bench.lane.book_tokens = 5, 3.0
    job = bench.submit(7)

    bench.mill.run(job)

    assert bench.lane.booked_together == [3, 3, 1]
    assert sorted(bench.lane.arrived) == list(range(7))


def test_a_row_larger_than_what_passes_within_seconds_is_booked_alone(bench: Bench) -> None:
    bench.lane.book_tokens = 0.5
    job = bench.submit(2)

    bench.mill.run(job)

    assert bench.lane.booked_together == [1, 1]
    assert statuses(bench, job) == ["ok", "ok"]


def test_a_chunk_that_somebody_else_has_is_left_alone(bench: Bench) -> None:
    job = bench.submit()
    bench.load()

    words = bench.mill.process.run_chunk(1)

    assert words == "nothing to do: taken, done or not open"
    assert bench.mill.rows(job) == []


def test_rows_that_have_an_answer_are_not_asked_again(bench: Bench) -> None:
    job = bench.submit(4)
    first = bench.load()
    bench.mill.process.call(first.host.recorder.reserve([booked(first, 0)], budgeted=False))
    bench.mill.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=[bench.mill.process.worker_id]))
    bench.mill.database.run(reaping.reap)

    bench.mill.run(job)

    assert sorted(bench.lane.arrived) == [0, 1, 2, 3]
    assert [r["calls"] for r in bench.mill.rows(job)] == [2, 1, 1, 1]
    assert bench.mill.violations(job) == []


def booked(run: ChunkRun, row: int) -> NewCall:
    """The first call of an attempt, for one row."""
    one = unit(run, row)
    one.seq, one.bound_nanousd = 1, bound_of(one, run.spec, run.step, side_by_side=1)
    return new_call(one, run.claim, run.step, worker=run.host.worker_name)


def unit(run: ChunkRun, row: int) -> Unit:
    return next(run._unit(g) for g in run._groups() if g[0][0] == row)


def test_the_tries_of_an_earlier_attempt_count(bench: Bench) -> None:
    job = bench.submit(1)
    bench.lane.answer = fail_always
    first = bench.load()
    bench.mill.process.call(first.host.recorder.reserve([booked(first, 0)], budgeted=False))
    bench.mill.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=[bench.mill.process.worker_id]))
    bench.mill.database.run(reaping.reap)

    bench.mill.run(job)

    assert statuses(bench, job) == ["failed"]
    assert len(bench.lane.arrived) == 1


def fail_always(_: Unit) -> Completion:
    raise CallTimeout("slow")


def test_a_chunk_that_this_worker_does_not_serve_is_handed_back(bench: Bench) -> None:
    job = bench.submit(2)
    bench.mill.process._lanes.clear()

    words = bench.mill.process.run_chunk(1)

    assert words.startswith("handed back: this worker serves")
    assert ready(bench, job) == [("0-1", 0, True)]


# Children


def test_rows_handed_back_are_grouped_by_step_and_by_whole_seconds_of_waiting(bench: Bench) -> None:
    job = bench.submit(9)
    steps = (Step(model=MODEL, upstream=MODEL, queue=QUEUE), Step(model="big", upstream="big", queue="gpu.big"))
    with bench.mill.database.transaction() as conn:
        spec = rounds.spec_of(conn, job.id, 1)
        rounds.set_first_spec(conn, job.id, replace(spec, steps=steps))
    run = bench.load()
    for rows, wait_s in (([0], 6.2), ([4], 6.9), ([1], 7.1), ([2], 0.0), ([3], 0.0)):
        run.hand_back(Handback(rows=rows, wait_s=wait_s, error=f"row {rows[0]}"))
    run.hand_back(Handback(rows=[7, 8], next_step=True))

    children = children_of(run._handbacks, run.spec, step=run.claim.step)

    assert [(str(c.rows), c.step, c.queue, c.wait_ms, c.error) for c in children] == [
        ("2-3", 0, QUEUE, 0, "row 2"),
        ("0,4", 0, QUEUE, 7_000, "row 0"),
        ("1", 0, QUEUE, 8_000, "row 1"),
        ("7-8", 1, "gpu.big", 0, None),
    ]


def test_nothing_handed_back_makes_no_child(bench: Bench) -> None:
    job = bench.submit(2)

    bench.mill.run(job)

    assert len(bench.mill.chunks(job)) == 1


def test_a_long_pause_of_the_provider_hands_all_rows_back_for_as_long(bench: Bench) -> None:
    job = bench.submit(3)
    bench.lane.pause = 40.0

    bench.mill.run(job)

    assert ready(bench, job) == [("0-2", 0, True)]
    assert bench.mill.calls(job) == []


# Stopping


def test_a_drain_cancels_what_is_not_sent_and_lets_calls_in_flight_finish(bench: Bench) -> None:
    lane = bench.use(HeldLane(places=2))
    lane.gate.clear()
    job = bench.submit(8)
    thread = bench.begin()
    until(lambda: len(lane.arrived) == 2 and len(bench.run_of()._tasks) == 8)

    bench.mill.process.drain()
    until(lambda: len(bench.run_of()._tasks) == 2)
    lane.gate.set()
    thread.join(TIMEOUT_S)

    assert statuses(bench, job) == ["ok", "ok"]
    assert [c["state"] for c in bench.mill.calls(job)] == ["settled"] * 2 + ["void"] * 6
    assert ready(bench, job) == [("2-7", 0, False)]
    assert (lane.window.taken, bench.mill.chunks(job)[0]["crash_count"]) == (0, 0)
    assert bench.mill.violations(job) == []


def test_calls_that_outlast_the_grace_are_cut_off_and_their_cost_stays_unknown(bench: Bench) -> None:
    lane = bench.use(HeldLane(places=2))
    lane.gate.clear()
    job = bench.submit(4)
    thread = bench.begin()
    until(lambda: len(lane.arrived) == 2 and len(bench.run_of()._tasks) == 4)

    bench.on_loop(bench.run_of().abandon)
    thread.join(TIMEOUT_S)

    calls = bench.mill.calls(job)
    assert [(c["state"], c["error_kind"]) for c in calls[:2]] == [("unknown", "abandoned")] * 2
    assert {c["state"] for c in calls[2:]} == {"void"}
    assert {c["bound_nanousd"] for c in calls} == {BOUND}
    assert ready(bench, job)[0] == ("0-3", 0, False)
    assert bench.mill.violations(job) == []


def test_rows_booked_while_the_attempt_is_stopped_are_never_sent(bench: Bench) -> None:
    job = bench.submit(4)
    booking, go_on = threading.Event(), threading.Event()
    reserve = bench.mill.process.recorder.reserve

    async def slow_reserve(*args: Any, **kwargs: Any) -> Any:
        answer = await reserve(*args, **kwargs)
        booking.set()
        await asyncio.to_thread(go_on.wait, TIMEOUT_S)
        return answer

    bench.mill.process.recorder.reserve = slow_reserve  # type: ignore[method-assign]  # holds the answer back
    thread = bench.begin()
    booking.wait(TIMEOUT_S)

    bench.mill.process.drain()
    go_on.set()
    thread.join(TIMEOUT_S)

    assert bench.lane.arrived == []
    assert {c["state"] for c in bench.mill.calls(job)} == {"void"}
    assert ready(bench, job) == [("0-3", 0, False)]
    assert bench.lane.window.taken == 0


def test_a_row_that_is_between_two_tries_when_the_attempt_stops_books_no_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.submit(1)
    slept = threading.Event()

    async def sleep(_: float) -> None:
        slept.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("batchmill_workers.chunk_run.answer", partial(answer, sleep=sleep))
    bench.lane.answer = fail_always
    thread = bench.begin()
    slept.wait(TIMEOUT_S)

    bench.mill.process.drain()
    thread.join(TIMEOUT_S)

    assert [c["state"] for c in bench.mill.calls(job)] == ["unknown"]
    assert ready(bench, job) == [("0", 0, False)]


def test_a_job_that_is_paused_sends_nothing_more_and_keeps_its_rows(bench: Bench) -> None:
    lane = bench.use(HeldLane(places=1, book_rows=1))
    lane.window = Window(1)
    lane.gate.clear()
    job = bench.submit(5)
    thread = bench.begin()
    until(lambda: lane.arrived)

    bench.mill.database.run(lambda conn: steering.pause(conn, job.id, kind="user", reason="by hand"))
    lane.gate.set()
    thread.join(TIMEOUT_S)

    assert statuses(bench, job) == ["ok"]
    assert ready(bench, job) == [("1-4", 0, False)]
    assert bench.mill.violations(job) == []


def test_an_attempt_that_lost_its_lease_stops_and_leaves_the_rows_to_the_new_owner(bench: Bench) -> None:
    lane = bench.use(HeldLane(places=1, book_rows=1))
    lane.window = Window(1)
    lane.gate.clear()
    job = bench.submit(5)
    thread = bench.begin()
    until(lambda: lane.arrived)
    bench.mill.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=[bench.mill.process.worker_id]))
    bench.mill.database.run(reaping.reap)

    lane.gate.set()
    thread.join(TIMEOUT_S)
    sent_by_the_loser = len(lane.arrived)
    bench.mill.run(job)

    assert sent_by_the_loser == 1
    assert statuses(bench, job) == ["ok"] * 5
    assert sorted(lane.arrived) == [0, 1, 2, 3, 4]
    assert [c["rows"] for c in bench.mill.chunks(job)] == ["0-4"]
    assert bench.mill.violations(job) == []


# Budgets


def test_the_bound_of_a_call(bench: Bench) -> None:
    bench.submit(1)
    run = bench.load()

    assert bound_of(unit(run, 0), run.spec, run.step, side_by_side=1) == BOUND


@pytest.mark.parametrize(
    ("rows", "side_by_side", "seconds"),
    [(1, 1, 120.0), (1, 64, 120.0 / 64), (32, 64, 60.0), (64, 64, 120.0), (64, 8, 120.0)],
)
def test_on_a_device_the_bound_is_the_rows_share_of_its_timeout(
    bench: Bench, rows: int, side_by_side: int, seconds: float
) -> None:
    bench.submit(1)
    run = bench.load()
    step = replace(run.step, price=None, device_nanousd_per_hour=3_600_000, timeout_s=120.0)
    several = Unit(items=unit(run, 0).items * rows)

    assert bound_of(several, run.spec, step, side_by_side=side_by_side) == math.ceil(1000 * seconds)


@pytest.mark.parametrize(
    ("params", "most"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "n": 3}, 15),
    ],
)
def test_the_longest_answer(params: dict[str, Any], most: int | None) -> None:
    assert output_bound(params) == most


def test_rows_wait_for_the_budget_that_calls_in_flight_give_back(bench: Bench) -> None:
    job = bench.submit(6, budget_nanousd=2 * BOUND)

    bench.mill.run(job)

    assert statuses(bench, job) == ["ok"] * 6
    assert bench.lane.most_in_flight <= 2
    assert bench.mill.violations(job) == []


def test_a_job_whose_next_row_does_not_fit_is_paused_for_its_budget(bench: Bench) -> None:
    job = bench.submit(6, budget_nanousd=2 * BOUND - 1)
    bench.lane.answer = lambda _: good(output=20)

    bench.mill.run(job)

    now = bench.mill.job(job)
    assert (now.state, now.reason_kind) == (JobState.PAUSED, "budget")
    assert now.cost_nanousd + now.unknown_nanousd <= 2 * BOUND
    assert 1 <= len(statuses(bench, job)) < 6
    assert [waits for _, _, waits in ready(bench, job)] == [False]


def test_a_retry_that_does_not_fit_the_budget_pauses_the_job_too(bench: Bench) -> None:
    job = bench.submit(1, budget_nanousd=2 * BOUND - 1)
    bench.lane.answer = fail_always

    bench.mill.run(job)

    now = bench.mill.job(job)
    assert (now.state, now.reason_kind, now.unknown_nanousd) == (JobState.PAUSED, "budget", BOUND)
    assert ready(bench, job) == [("0", 0, False)]


def test_two_retries_that_both_do_not_fit_pause_the_job_too(bench: Bench) -> None:
    job = bench.submit(2, budget_nanousd=3 * BOUND - 1)
    bench.lane.answer = fail_always

    bench.mill.run(job)
    bench.mill.let_pass(job, 5)
    bench.mill.run(job)

    now = bench.mill.job(job)
    assert (now.state, now.reason_kind) == (JobState.PAUSED, "budget")
    assert now.unknown_nanousd == 2 * BOUND


# Faults of our own


def break_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(validation, "sanitize", broken)


def test_a_fault_of_our_own_hands_the_rows_back_with_a_wait_and_books_the_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = bench.submit(1)
    break_validation(monkeypatch)

    bench.mill.run(job)

    (child,) = [c for c in bench.mill.chunks(job) if c["state"] == "ready"]
    assert "planted" in child["last_error"]
    assert ready(bench, job) == [("0", 0, True)]
    assert [c["state"] for c in bench.mill.calls(job)] == ["unknown"]
    assert "row_way_failed" in caplog.text
    assert bench.lane.window.taken == 0


def test_a_fault_of_our_own_that_stays_ends_the_row_when_its_tries_are_used_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.submit(1)
    with monkeypatch.context() as patch:
        break_validation(patch)
        bench.mill.run(job)
    bench.mill.let_pass(job, 60)
    bench.lane.answer = break_down

    bench.mill.run(job)

    (row,) = bench.mill.rows(job)
    assert (row["status"], row["error_kind"], row["calls"]) == ("failed", "engine_failed", 2)
    assert bench.mill.violations(job) == []


def break_down(_: Unit) -> Completion:
    raise ZeroDivisionError("planted")


def test_an_engine_that_raises_what_it_should_not_fails_its_row_only(bench: Bench) -> None:
    job = bench.submit(3)
    bench.lane.answer = lambda u: break_down(u) if u.items[0].row == 1 else good()

    bench.mill.run(job)

    assert statuses(bench, job) == ["ok", "failed", "ok"]
    assert bench.mill.rows(job)[1]["error"] == "ZeroDivisionError: planted"


def test_rows_that_cannot_be_booked_are_handed_back_and_give_their_places_back(bench: Bench) -> None:
    job = bench.submit(3)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise DatabaseError("planted")

    bench.mill.process.recorder.reserve = refuse  # type: ignore[method-assign]  # a database that refuses

    bench.mill.run(job)

    assert ready(bench, job) == [("0-2", 0, True)]
    assert bench.lane.window.taken == 0


def test_a_row_of_its_own_fault_is_final(bench: Bench) -> None:
    job = bench.submit(2)

    def refuse_the_first(unit: Unit) -> Completion:
        if unit.items[0].row == 0:
            raise InvalidRequest("wrong")
        return good()

    bench.lane.answer = refuse_the_first

    bench.mill.run(job)

    assert statuses(bench, job) == [RowStatus.FAILED, RowStatus.OK]
    assert Rows.of(bench.lane.arrived) == Rows.span(0, 2)


def test_a_row_that_kills_its_engine_is_found_by_halving_and_the_others_are_answered(bench: Bench) -> None:
    """The engine's process dies with every call in it, whichever row is at fault."""

    def answer(unit: Unit) -> Completion:
        if unit.items[0].row == 5:
            raise EngineLost("the engine's process died (signal 11)")
        return good()

    job = bench.submit(rows=8)
    bench.lane.answer = answer

    bench.mill.run(job)

    ended = bench.mill.job(job)
    assert ended.state is JobState.DONE
    assert {s.value: n for s, n in ended.by_status.items() if n} == {"ok": 7, "dead": 1}
    assert [r["row"] for r in bench.mill.rows(job)] == [0, 1, 2, 3, 4, 6, 7]
    assert bench.mill.violations(job) == []


def test_a_dead_engine_is_logged_once_for_a_chunk_and_not_for_each_of_its_rows(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: Unit) -> Completion:
        raise EngineLost("the engine's process died")

    lane = bench.use(HeldLane(book_rows=8))
    lane.answer = answer
    lane.gate.clear()
    bench.submit(rows=8)
    running = bench.begin()
    until(lambda: len(lane.arrived) == 8)
    lane.gate.set()
    running.join(timeout=10)

    assert len([said for said in caplog.messages if said.startswith("engine_lost")]) == 1


def test_a_crash_of_the_engine_costs_no_row_a_try(bench: Bench) -> None:
    deaths = iter([True, True])

    def answer(unit: Unit) -> Completion:
        if unit.items[0].row == 0 and next(deaths, False):
            raise EngineLost("the engine's process died")
        return good()

    job = bench.submit(rows=1)
    bench.lane.answer = answer

    bench.mill.run(job)

    past = bench.mill.database.run(lambda conn: past_calls.past_of(conn, job.id, Rows.span(0, 1), 1))
    assert past[0].tries == 1
    assert [r["calls"] for r in bench.mill.rows(job)] == [3]
