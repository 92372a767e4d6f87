"""Limits of one account within a process, on a loop whose time jumps to the next timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill_core import errors
from batchmill_core.catalog import Limits
from batchmill_workers.api.bucket import Bucket
from batchmill_workers.api.quota import Permit, Quota, QuotaWait

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: when nothing is ready, its time jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]  # base_events keeps them so in 3.11 to 3.14
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]  # as above
        super()._run_once()  # type: ignore[misc]  # as above


def run(test: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(test(), 1e9)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())


def quota_of(
    limits: Limits | None = None, *, in_flight: int = 10_000, models: Mapping[str, Limits] = MappingProxyType({})
) -> Quota:
    clock = asyncio.get_running_loop().time
    return Quota(limits or Limits(), max_in_flight=in_flight, models=models, clock=clock)


async def admissions(
    quota: Quota, count: int, *, tokens: int = 0, model: str = "m", call_s: float = 0.0
) -> list[float]:
    """When each of ``count`` rows that arrive together was let in."""
    times: list[float] = []

    async def row() -> None:
        async with quota.admit(model, tokens, max_wait_s=1e9):
            times.append(quota.clock())
            if call_s:
                await asyncio.sleep(call_s)

    await asyncio.gather(*(row() for _ in range(count)))
    return times


def most_within(times: list[float], span_s: float) -> int:
    return max(sum(start <= t < start + span_s for t in times) for start in times)


def test_without_limits_nobody_waits() -> None:
    async def act() -> list[float]:
        return await admissions(quota_of(), 1_000)

    assert set(run(act)) == {0.0}


@pytest.mark.parametrize(
    ("limits", "per_s", "burst"),
    [
        (Limits(requests_per_minute=60), 1.0, 1),
        (Limits(requests_per_minute=600), 10.0, 10),
        (Limits(requests_per_second=100, burst=1), 100.0, 1),
        (Limits(requests_per_second=0.5, burst=4), 0.5, 4),
    ],
)
def test_requests_keep_the_rate_and_burst_and_use_them_fully(limits: Limits, per_s: float, burst: int) -> None:
    async def act() -> list[float]:
        return await admissions(quota_of(limits), 100)

    times = run(act)

    for span_s in (1.0, 10.0, 60.0):
        assert most_within(times, span_s) <= burst + span_s * per_s + 1e-6
    ideal_s = (100 - burst) / per_s
    assert ideal_s - 1e-6 <= times[-1] <= ideal_s * 1.1 + 0.1


def test_tokens_keep_their_rate() -> None:
    async def act() -> list[float]:
        return await admissions(quota_of(Limits(tokens_per_minute=60_000)), 50, tokens=400)

    times = run(act)

    assert most_within(times, 60.0) * 400 <= 61_000
    assert times[-1] == pytest.approx(19.0, abs=0.2)


def test_a_request_larger_than_the_burst_passes_when_all_before_it_are_paid() -> None:
    async def act() -> list[float]:
        return await admissions(quota_of(Limits(tokens_per_minute=60_000)), 3, tokens=5_000)

    assert run(act) == pytest.approx([0.0, 5.0, 10.0], abs=0.02)


def test_no_more_than_the_maximum_are_in_flight() -> None:
    async def act() -> tuple[list[float], int]:
        quota = quota_of(in_flight=4)
        return await admissions(quota, 12, call_s=1.0), quota.in_flight

    times, left = run(act)

    assert times == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert left == 0


def test_rows_of_a_model_are_let_in_in_order_of_arrival() -> None:
    async def act() -> list[int]:
        quota, order = quota_of(Limits(requests_per_second=10), in_flight=3), list[int]()

        async def row(n: int) -> None:
            async with quota.admit("m"):
                order.append(n)
                await asyncio.sleep(0.3)

        await asyncio.gather(*(row(n) for n in range(40)))
        return order

    assert run(act) == list(range(40))


def test_a_models_own_limit_does_not_hold_up_other_models() -> None:
    async def act() -> tuple[list[float], list[float]]:
        quota = quota_of(models={"slow": Limits(requests_per_second=1)})
        slow, fast = await asyncio.gather(
            admissions(quota, 5, model="slow"), admissions(quota, 5, model="fast", call_s=0.1)
        )
        return slow, fast

    slow, fast = run(act)

    assert fast == [0.0] * 5
    assert slow == pytest.approx([0, 1, 2, 3, 4], abs=0.02)


def test_a_large_request_is_not_starved_by_small_ones_of_another_model() -> None:
    async def act() -> float:
        quota = quota_of(Limits(tokens_per_minute=60_000))
        await admissions(quota, 1, tokens=1_000)
        large = asyncio.ensure_future(admissions(quota, 1, tokens=1_000, model="large"))
        await asyncio.sleep(0.01)
        small = [asyncio.ensure_future(admissions(quota, 1, tokens=100, model="small")) for _ in range(100)]
        await asyncio.gather(*small)
        return (await large)[0]

    assert run(act) == pytest.approx(1.0, abs=0.02)


def test_two_models_share_the_account_in_order_of_arrival() -> None:
    async def act() -> list[str]:
        quota, order = quota_of(Limits(requests_per_second=1)), list[str]()

        async def row(model: str) -> None:
            async with quota.admit(model, max_wait_s=100):
                order.append(model)

        await asyncio.gather(*(row("ab"[n % 2]) for n in range(10)))
        return order

    assert run(act) == ["a", "b"] * 5


def test_a_turn_too_far_off_is_refused_at_once_with_its_wait_and_takes_nothing() -> None:
    async def act() -> tuple[list[float], float, int]:
        quota = quota_of(Limits(requests_per_minute=60))

        async def row() -> float | None:
            try:
                async with quota.admit("m", max_wait_s=3.0):
                    return None
            except QuotaWait as e:
                return e.wait_s

        waits = await asyncio.gather(*(row() for _ in range(8)))
        return [w for w in waits if w is not None], quota.clock(), quota.in_flight

    waits, now, in_flight = run(act)

    assert waits == pytest.approx([4.0, 4.0, 4.0, 4.0])
    assert now == pytest.approx(3.0, abs=0.02)
    assert in_flight == 0


def test_a_newcomer_can_ask_how_long_the_line_is() -> None:
    async def act() -> tuple[float, float, float]:
        quota = quota_of(Limits(requests_per_second=1))
        before = quota.line_s("m")
        waiting = [asyncio.ensure_future(admissions(quota, 1)) for _ in range(4)]
        await asyncio.sleep(0.01)
        same, other = quota.line_s("m"), quota.line_s("other")
        await asyncio.gather(*waiting)
        return before, same, other

    assert run(act) == pytest.approx((0.0, 4.0, 4.0), abs=0.02)


@pytest.mark.parametrize("limits", [Limits(requests_per_minute=60), Limits(tokens_per_minute=6_000)])
def test_a_newcomer_stands_behind_those_that_are_being_booked(limits: Limits) -> None:
    async def act() -> tuple[float, float]:
        quota = quota_of(limits)
        with quota.coming("m", [100, 100, 100]):
            booking_s = quota.line_s("m", 100)
        return booking_s, quota.line_s("m", 100)

    assert run(act) == pytest.approx((3.0, 0.0), abs=0.02)


def test_a_429_with_a_wait_stops_all_rows_of_the_account_until_then() -> None:
    async def act() -> tuple[float, float]:
        quota = quota_of()
        quota.failed(errors.RateLimited("slow down", wait_s=2.0))
        first = (await admissions(quota, 1))[0]
        return first, quota.paused_s

    assert run(act) == pytest.approx((2.0, 0.0), abs=0.02)


def test_a_pause_longer_than_their_patience_turns_those_in_line_away() -> None:
    async def act() -> float:
        quota = quota_of(in_flight=1)
        async with quota.admit("m"):
            waiting = asyncio.ensure_future(quota.admit("m", max_wait_s=5).__aenter__())
            await asyncio.sleep(0.01)
            quota.failed(errors.RateLimited("slow down", wait_s=60.0))
            with pytest.raises(QuotaWait) as caught:
                await waiting
        assert quota.waiting == 0
        return caught.value.wait_s

    assert run(act) == pytest.approx(60.0)


def test_a_pause_is_never_shortened() -> None:
    async def act() -> float:
        quota = quota_of()
        quota.pause(10.0)
        quota.pause(1.0)
        return quota.paused_s

    assert run(act) == 10.0


@pytest.mark.parametrize("error", [errors.Unreachable("refused"), errors.RateLimited("slow down")])
def test_a_provider_that_turns_every_call_away_is_asked_every_few_seconds_only(error: errors.CallError) -> None:
    async def act() -> tuple[int, float]:
        quota = quota_of(in_flight=32)
        times: list[float] = []

        async def row() -> None:
            while quota.clock() < 3600:
                async with quota.admit("m", max_wait_s=5):
                    times.append(quota.clock())
                    quota.failed(error)

        await asyncio.gather(*(row() for _ in range(50)))
        assert quota.in_vain
        quota.succeeded(latency_s=0.1)
        return len(times), quota.paused_s

    tries, pause_s = run(act)
    assert tries < 1100  # one per 4 s, and those that shrank the limit to one
    assert pause_s <= 4.0


def test_an_answer_ends_the_pauses_between_calls_made_in_vain() -> None:
    async def act() -> list[float]:
        quota = quota_of(in_flight=1)
        for _ in range(10):
            quota.failed(errors.Unreachable("refused"))
        await asyncio.sleep(quota.paused_s)
        quota.succeeded(latency_s=0.1)
        quota.failed(errors.Unreachable("refused"))
        return [quota.paused_s, float(quota.in_vain)]

    assert run(act) == pytest.approx([0.1, 0.0], abs=0.02)


def test_tokens_that_were_not_used_are_given_back() -> None:
    async def act() -> float:
        quota = quota_of(Limits(tokens_per_minute=60_000))
        async with quota.admit("m", 10_000) as permit:
            permit.used(1_500)
        return (await admissions(quota, 1, tokens=1_000))[0]

    assert run(act) == pytest.approx(1.5, abs=0.02)


def test_a_call_that_surely_did_not_run_gives_its_tokens_back() -> None:
    async def act() -> float:
        quota = quota_of(Limits(tokens_per_minute=60_000))
        with pytest.raises(errors.Unreachable):
            async with quota.admit("m", 60_000):
                raise errors.Unreachable("refused")
        return (await admissions(quota, 1, tokens=1_000))[0]

    assert run(act) == 0.0


def test_a_row_cancelled_in_line_leaves_no_trace() -> None:
    async def act() -> tuple[int, int, float]:
        quota = quota_of(Limits(requests_per_second=1))
        await admissions(quota, 1)
        waiting = [asyncio.ensure_future(admissions(quota, 1)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return quota.waiting, quota.in_flight, (await admissions(quota, 1))[0]

    assert run(act) == pytest.approx((0, 0, 1.0), abs=0.02)


def test_a_row_cancelled_just_when_its_turn_came_gives_everything_back() -> None:
    async def act() -> tuple[int, list[float]]:
        quota = quota_of(Limits(requests_per_second=1, burst=2), in_flight=1)
        holder = quota.admit("m")
        await holder.__aenter__()
        waiting = asyncio.ensure_future(admissions(quota, 1))
        await asyncio.sleep(0.01)
        await holder.__aexit__(None, None, None)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return quota.in_flight, await admissions(quota, 1)

    assert run(act) == (0, [0.01])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.floats(0, 2), st.floats(0, 3), st.booleans()), max_size=30),
    st.integers(1, 5),
)
def test_whatever_rows_do_the_books_end_even_and_the_limits_hold(
    rows: list[tuple[int, float, float, bool]], in_flight: int
) -> None:
    async def act() -> tuple[Quota, list[tuple[float, int]], int]:
        limits = Limits(requests_per_second=5, burst=3, tokens_per_minute=60_000)
        quota, let_in, most = quota_of(limits, in_flight=in_flight), list[tuple[float, int]](), 0

        async def row(tokens: int, arrives_s: float, call_s: float) -> None:
            nonlocal most
            await asyncio.sleep(arrives_s)
            async with quota.admit("m", tokens, max_wait_s=1.0):
                let_in.append((quota.clock(), tokens))
                most = max(most, quota.in_flight)
                await asyncio.sleep(call_s)

        tasks = [(asyncio.ensure_future(row(t, a, c)), stop) for t, a, c, stop in rows]
        await asyncio.sleep(1.0)
        for task, stop in tasks:
            if stop:
                task.cancel()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        return quota, let_in, most

    quota, let_in, most = run(act)

    assert (quota.in_flight, quota.waiting) == (0, 0)
    assert most <= in_flight
    for start, _ in let_in:
        within = [tokens for t, tokens in let_in if start <= t < start + 1.0]
        assert len(within) <= 3 + 5
        assert sum(within) <= 1_000 + 1_000 + 1e-6


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=60), st.floats(0.5, 100), st.integers(1, 40))
def test_a_bucket_never_passes_more_than_burst_and_rate(
    arrivals: list[tuple[float, int]], per_s: float, burst: int
) -> None:
    bucket, now, passed = Bucket(per_s=per_s, burst=burst), 0.0, list[tuple[float, int]]()
    for gap_s, units in arrivals:
        now += gap_s
        if bucket.wait_s(units, now=now) == 0.0:
            bucket.take(units, now=now)
            passed.append((now, units))

    for i, (start, _) in enumerate(passed):
        for end, _ in passed[i:]:
            within = [units for t, units in passed if start <= t <= end]
            assert sum(within) <= max(burst, *within) + (end - start) * per_s + 1e-4


def test_a_permit_is_cheap_to_pass_when_nothing_is_limited() -> None:
    async def act() -> bool:
        permit: Permit = quota_of().admit("m", 100)
        entering = permit.__aenter__()
        try:
            entering.send(None)
        except StopIteration:
            return True
        return False

    assert run(act)
