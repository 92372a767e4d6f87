"""The way of one request, apart from engine, SQL and clock: what is saved, booked, handed back and stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from batchmill_core.errors import (
    AuthFailed,
    CallError,
    CallState,
    CallTimeout,
    ConnectionLost,
    EngineFailed,
    InvalidRequest,
    MalformedResponse,
    Overloaded,
    RateLimited,
    TooLong,
    UnknownModel,
    Unreachable,
)
from batchmill_core.job import Step
from batchmill_core.request import Completion, Request, RowStatus, TaskKind
from batchmill_core.usage import Price, Usage
from batchmill_db.ledger import CallEnd
from batchmill_db.results import NewResult
from batchmill_workers import answer as way_of_request
from batchmill_workers.answer import Handback, QuotaWait, answer, as_call_error
from batchmill_workers.call_ends import call_cost
from batchmill_workers.unit import Item, Unit
from batchmill_workers.validation import compile_schema

PRICE = Price.from_usd_per_mtok({"input": 1, "output": 2})
STEP = Step(model="m", upstream="u", queue="api.a", account="a", price=PRICE, max_retries=2)
USAGE = Usage(input=10, output=5)
COST = 20_000
SCHEMA = compile_schema({"type": "object", "required": ["label"]})


class FakeWay:
    """An attempt that answers by script and remembers what it was told."""

    def __init__(self, *replies: Completion | BaseException, step: Step = STEP, more_steps: bool = False) -> None:
        self.step = step
        self.task = TaskKind.CHAT
        self.rng = random.Random(7)
        self.validator: Any = None
        self.more_steps = more_steps
        self.may_book = True
        self.sent: list[list[int]] = []
        self.rows: list[NewResult] = []
        self.ends: list[CallEnd] = []
        self.handbacks: list[Handback] = []
        self.stopped: list[tuple[str, str]] = []
        self.slept: list[float] = []
        self._replies = list(replies)
        self._seq = 1

    async def send(self, unit: Unit) -> Completion:
        self.sent.append(unit.rows)
        unit.sending = True
        reply = self._replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def book_again(self, unit: Unit) -> bool:
        if self.may_book:
            self._seq += 1
            unit.seq, unit.bound_nanousd = self._seq, 900
        return self.may_book

    def save(self, rows: Sequence[NewResult], ends: Sequence[CallEnd]) -> None:
        self.rows += rows
        self.ends += ends

    def hand_back(self, handback: Handback) -> None:
        self.handbacks.append(handback)

    def stop_account(self, error: CallError) -> None:
        self.stopped.append(("account", error.kind))

    def stop_job(self, error: CallError) -> None:
        self.stopped.append(("job", error.kind))

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def unit_of(*rows: int, tries: int = 0) -> Unit:
    items = [Item(row=r, request=Request(), weight=r + 1) for r in rows or (0,)]
    return Unit(items=items, tries=tries, seq=1, bound_nanousd=900)


def go(way: FakeWay, unit: Unit | None = None) -> FakeWay:
    asyncio.run(answer(unit or unit_of(), way, sleep=way.sleep))
    return way


def good(text: str | None = "yes", **fields: Any) -> Completion:
    return Completion(**{"text": text, "finish_reason": "stop", "usage": USAGE, **fields})


def vectors(count: int, usage: Usage | None = USAGE) -> Completion:
    return Completion(vectors=tuple(bytes(4) for _ in range(count)), usage=usage)


def test_a_good_answer_is_saved_with_its_call() -> None:
    way = go(FakeWay(good(latency_ms=12, ttft_ms=3, request_id="r-1")))

    (row,), (end,) = way.rows, way.ends
    assert (row.status, row.output, row.cost_nanousd, row.calls, row.seqs) == (RowStatus.OK, "yes", COST, 1, (1,))
    assert (row.model, row.account, row.latency_ms, row.ttft_ms) == ("m", "a", 12, 3)
    assert (end.state, end.cost_nanousd, end.usage, end.request_id) == (CallState.SETTLED, COST, USAGE, "r-1")
    assert way.handbacks == []


def test_an_answer_without_usage_is_kept_and_its_cost_is_unknown_with_its_bound() -> None:
    way = go(FakeWay(good(usage=None)))

    (row,), (end,) = way.rows, way.ends
    assert (row.status, row.usage, row.cost_nanousd, row.unknown_nanousd) == (RowStatus.OK, None, None, 900)
    assert (end.state, end.cost_nanousd, end.bound_nanousd) == (CallState.UNKNOWN, None, 900)


@pytest.mark.parametrize(
    ("completion", "status", "output"),
    [
        (good(finish_reason="length"), RowStatus.TRUNCATED, "yes"),
        (good(None, finish_reason="length"), RowStatus.TRUNCATED, None),
        (good(None, finish_reason="content_filter"), RowStatus.FILTERED, None),
        (good(None, refusal="No."), RowStatus.REFUSED, "No."),
        (good("a\x00b"), RowStatus.OK, "a\ufffdb"),
    ],
)
def test_the_completion_says_the_status(completion: Completion, status: RowStatus, output: str | None) -> None:
    (row,) = go(FakeWay(completion)).rows

    assert (row.status, row.output) == (status, output)
    assert row.sanitized == (output == "a\ufffdb")


def test_a_truncated_answer_is_not_held_against_the_schema() -> None:
    way = FakeWay(good('{"lab', finish_reason="length"))
    way.validator = SCHEMA

    (row,) = go(way).rows

    assert (row.status, row.output) == (RowStatus.TRUNCATED, '{"lab')


def test_a_failed_call_and_the_one_that_bettered_it_are_both_on_the_row() -> None:
    way = go(FakeWay(ConnectionLost("cut"), MalformedResponse("odd", usage=USAGE), good()))

    (row,) = way.rows
    assert [(e.seq, e.state, e.wasted) for e in way.ends] == [
        (1, CallState.UNKNOWN, False),
        (2, CallState.SETTLED, True),
        (3, CallState.SETTLED, False),
    ]
    assert (row.calls, row.seqs, row.cost_nanousd, row.unknown_nanousd) == (3, (1, 2, 3), 2 * COST, 900)
    assert row.usage == USAGE + USAGE


def test_calls_of_earlier_attempts_stay_on_the_row() -> None:
    unit = unit_of()
    unit.items[0].calls, unit.items[0].cost_nanousd, unit.items[0].unknown_nanousd = 2, 1_000, 50

    (row,) = go(FakeWay(good()), unit).rows

    assert (row.calls, row.cost_nanousd, row.unknown_nanousd) == (3, 1_000 + COST, 50)


def test_tries_end_with_the_errors_status_and_words() -> None:
    way = go(FakeWay(*[CallTimeout("slow\x00", raw="r\x00") for _ in range(3)]))

    (row,) = way.rows
    assert (row.status, row.error_kind, row.error, row.raw) == (RowStatus.FAILED, "timeout", "slow\ufffd", "r\ufffd")
    assert (len(way.ends), len(way.slept)) == (3, 2)


def test_tries_of_earlier_attempts_count() -> None:
    way = go(FakeWay(CallTimeout("slow")), unit_of(tries=2))

    assert [r.status for r in way.rows] == [RowStatus.FAILED]


def test_waiting_uses_up_no_try() -> None:
    waits = [RateLimited("wait", wait_s=0.1) for _ in range(10)]

    way = go(FakeWay(*waits, Unreachable("gone"), good()))

    assert [r.status for r in way.rows] == [RowStatus.OK]
    assert way.rows[0].calls == 1
    assert {e.state for e in way.ends[:-1]} == {CallState.VOID}


def test_a_wait_of_up_to_five_seconds_stays_in_the_loop() -> None:
    way = go(FakeWay(RateLimited("wait", wait_s=2.0), good()))

    assert 2.0 <= way.slept[0] <= 4.0
    assert way.handbacks == []


def test_a_longer_wait_is_handed_back() -> None:
    way = go(FakeWay(Overloaded("busy", wait_s=30.0)), unit_of(3))

    (handback,) = way.handbacks
    assert handback.rows == [3]
    assert 30.0 <= handback.wait_s <= 60.0
    assert handback.error == "overloaded_or_unavailable: busy"
    assert (way.rows, way.slept) == ([], [])


def test_a_quota_wait_is_handed_back_and_its_call_is_void() -> None:
    way = go(FakeWay(QuotaWait(12.0, "no room")))

    assert [(e.state, e.error_kind) for e in way.ends] == [(CallState.VOID, "not_sent")]
    assert [(h.wait_s, h.error) for h in way.handbacks] == [(12.0, "no room")]


@pytest.mark.parametrize(("error", "scope"), [(AuthFailed("no"), "account"), (UnknownModel("no"), "job")])
def test_a_fault_of_account_or_job_stops_it_and_the_rows_keep_their_turn(error: CallError, scope: str) -> None:
    way = go(FakeWay(error))

    assert way.stopped == [(scope, error.kind)]
    assert [(h.rows, h.wait_s) for h in way.handbacks] == [([0], 0.0)]
    assert (way.rows, [e.state for e in way.ends]) == ([], [CallState.VOID])


def test_a_row_that_may_not_be_booked_again_is_handed_back() -> None:
    way = FakeWay(CallTimeout("slow"))
    way.may_book = False

    go(way)

    assert [h.rows for h in way.handbacks] == [[0]]
    assert (way.rows, len(way.ends)) == ([], 1)


def test_a_row_that_its_step_gives_up_goes_on_to_the_next_step() -> None:
    way = go(FakeWay(TooLong("long"), more_steps=True))

    assert [(h.rows, h.next_step, h.error) for h in way.handbacks] == [([0], True, "too_long")]
    assert way.rows == []


def test_a_call_is_not_in_flight_while_its_row_waits_for_the_next_try() -> None:
    way, unit = FakeWay(CallTimeout("slow"), good()), unit_of()
    sending: list[bool] = []

    async def sleep(_: float) -> None:
        sending.append(unit.sending)

    asyncio.run(answer(unit, way, sleep=sleep))

    assert sending == [False]


@pytest.mark.parametrize("sent", [True, False])
def test_a_call_that_is_cut_off_is_unknown_if_it_was_sent_and_void_if_not(sent: bool) -> None:
    way, unit = FakeWay(), unit_of()

    async def cut_off() -> None:
        asked = asyncio.Event()

        async def send(unit: Unit) -> Completion:
            unit.sending = sent
            asked.set()
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        way.send = send  # type: ignore[method-assign]  # one call that never ends
        task = asyncio.create_task(answer(unit, way))
        await asked.wait()
        task.cancel()
        await task

    asyncio.run(cut_off())

    (end,) = way.ends
    assert end.state is (CallState.UNKNOWN if sent else CallState.VOID)
    assert [h.rows for h in way.handbacks] == [[0]]
    assert unit.items[0].unknown_nanousd == (900 if sent else None)


def test_a_row_cut_off_between_two_tries_is_handed_back() -> None:
    way = FakeWay(CallTimeout("slow"))

    async def sleep(_: float) -> None:
        raise asyncio.CancelledError

    asyncio.run(answer(unit_of(), way, sleep=sleep))

    assert [h.rows for h in way.handbacks] == [[0]]
    assert [e.state for e in way.ends] == [CallState.UNKNOWN]


# Calls over several rows


def embed(*replies: Completion | BaseException, **options: Any) -> FakeWay:
    way = FakeWay(*replies, **options)
    way.task = TaskKind.EMBED
    return way


def test_rows_of_one_call_share_its_usage_and_cost_exactly() -> None:
    way = go(embed(vectors(3, Usage(input=7))), unit_of(0, 1, 2))

    assert [r.usage.input for r in way.rows if r.usage] == [1, 2, 4]
    assert sum(r.cost_nanousd or 0 for r in way.rows) == way.ends[0].cost_nanousd == 7_000


def test_too_few_vectors_are_never_shifted() -> None:
    way = go(embed(vectors(1), vectors(2)), unit_of(0, 1))

    assert [e.error_kind for e in way.ends] == ["malformed_response", None]
    assert [r.status for r in way.rows] == [RowStatus.OK] * 2


def test_a_call_that_fails_for_one_of_its_rows_is_halved_until_the_row_stands_alone() -> None:
    bad = InvalidRequest("bad text")
    way = go(embed(bad, vectors(2), bad, bad, vectors(1)), unit_of(0, 1, 2, 3))

    assert way.sent == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]
    assert {r.row: r.status.value for r in way.rows} == {0: "ok", 1: "ok", 2: "failed", 3: "ok"}


def test_halves_that_cannot_be_booked_are_handed_back() -> None:
    way = embed(InvalidRequest("bad text"))
    way.may_book = False

    go(way, unit_of(0, 1, 2))

    assert [h.rows for h in way.handbacks] == [[0], [1, 2]]


def test_the_waits_of_a_half_are_waited_like_those_of_the_whole() -> None:
    way = go(embed(InvalidRequest("bad"), RateLimited("wait", wait_s=1.0), vectors(1), vectors(1)), unit_of(0, 1))

    assert len(way.slept) == 1
    assert [r.status for r in way.rows] == [RowStatus.OK] * 2


def test_a_fault_that_another_try_may_better_is_not_halved() -> None:
    way = go(embed(*[CallTimeout("slow")] * 3), unit_of(0, 1))

    assert way.sent == [[0, 1]] * 3
    assert [r.status for r in way.rows] == [RowStatus.FAILED] * 2


# Costs, and faults that are not an engine's to raise


@pytest.mark.parametrize(
    ("step", "usage", "device_ns", "cost"),
    [
        (STEP, USAGE, None, COST),
        (STEP, None, 5, None),
        (Step(model="m", upstream="m", queue="q", device_nanousd_per_hour=3_600_000_000_000), USAGE, 7, 7),
        (Step(model="m", upstream="m", queue="q", device_nanousd_per_hour=36), USAGE, None, None),
        (Step(model="m", upstream="m", queue="q"), USAGE, 7, None),
    ],
)
def test_a_call_costs_tokens_or_device_time_or_is_unknown(
    step: Step, usage: Usage | None, device_ns: int | None, cost: int | None
) -> None:
    assert call_cost(step, usage, device_ns) == cost


def test_what_an_engine_should_not_have_raised_becomes_a_fault_of_the_row() -> None:
    assert isinstance(as_call_error(TimeoutError()), CallTimeout)
    assert str(as_call_error(KeyError("x"))) == "KeyError: 'x'"


def test_a_fault_of_our_own_on_the_last_try_fails_the_row_with_its_bound() -> None:
    rows, ends = way_of_request.given_up(unit_of(0, 1), ZeroDivisionError("oops"), STEP)

    assert [(r.status, r.error_kind) for r in rows] == [(RowStatus.FAILED, EngineFailed.kind)] * 2
    assert sum(r.unknown_nanousd or 0 for r in rows) == 900
    assert [e.state for e in ends] == [CallState.UNKNOWN]
