"""The adaptive limit of calls in flight, against providers that bear any load, some of it, or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core import errors
from batchmill_core.errors import CallError
from batchmill_workers.api.concurrency import AdaptiveLimit

LIMITED = errors.RateLimited("slow down")


def round_trip(limit: AdaptiveLimit, *, bears: int = 10_000, latency_s: float = 0.1) -> int:
    """A full house of calls to a provider that answers ``bears`` of them and limits the rest; how many it limited."""
    sent = limit.limit
    for n in range(sent):
        if n < bears:
            limit.succeeded(latency_s=latency_s, in_flight=sent)
        else:
            limit.failed(LIMITED)
    return max(0, sent - bears)


def trips_until(limit: AdaptiveLimit, target: int, *, bears: int = 10_000) -> int:
    for n in range(1_000):
        if limit.limit >= target:
            return n
        round_trip(limit, bears=bears)
    raise AssertionError(f"never reached {target}, stands at {limit.limit}")


def test_it_starts_full_so_that_a_healthy_provider_is_filled_at_once() -> None:
    limit = AdaptiveLimit(256)

    for _ in range(50):
        round_trip(limit)

    assert limit.limit == 256


def test_a_provider_that_limits_everything_is_left_with_one_call_within_ten_round_trips() -> None:
    limit = AdaptiveLimit(256)

    for _ in range(10):
        round_trip(limit, bears=0)

    assert limit.limit == 1


def test_one_round_trip_of_failures_halves_it() -> None:
    limit = AdaptiveLimit(256)

    round_trip(limit, bears=0)

    assert limit.limit == 128


def test_it_comes_back_to_full_within_thirty_round_trips() -> None:
    limit = AdaptiveLimit(256)
    for _ in range(20):
        round_trip(limit, bears=0)

    assert trips_until(limit, 256) <= 30


def test_it_settles_near_what_the_provider_bears() -> None:
    limit = AdaptiveLimit(256)
    for _ in range(60):
        round_trip(limit, bears=100)

    trips = [(limit.limit, round_trip(limit, bears=100)) for _ in range(100)]

    sent, limited = (sum(column) for column in zip(*trips, strict=True))
    assert 90 <= sent / 100 <= 125
    assert limited / sent < 0.15


@pytest.mark.parametrize("every", [20, 50])
def test_a_small_share_of_failures_that_no_limit_would_heal_does_not_shrink_it(every: int) -> None:
    limit = AdaptiveLimit(256)

    for n in range(1, 20_000):
        if n % every == 0:
            limit.failed(LIMITED)
        else:
            limit.succeeded(latency_s=0.1, in_flight=limit.limit)

    assert limit.limit >= 0.95 * 256


@pytest.mark.parametrize("error", [errors.InvalidRequest("no"), errors.InvalidOutput("no"), errors.Unavailable("no")])
def test_faults_that_say_nothing_about_load_change_nothing(error: CallError) -> None:
    limit = AdaptiveLimit(8)

    limit.failed(error)

    assert limit.limit == 8


def test_idle_answers_do_not_raise_a_limit_that_was_not_used() -> None:
    limit = AdaptiveLimit(256)
    for _ in range(20):
        round_trip(limit, bears=0)
    trips_until(limit, 20)

    before = limit.limit
    for _ in range(1_000):
        limit.succeeded(latency_s=0.1, in_flight=1)

    assert limit.limit == before


def test_a_queue_at_the_provider_is_yielded_to_but_a_quarter_is_kept() -> None:
    limit = AdaptiveLimit(64)
    for _ in range(5):
        round_trip(limit, latency_s=0.1)

    limits = []
    for n in range(60):
        round_trip(limit, latency_s=0.1 * 6 ** (1 + n / 10))
        limits.append(limit.limit)

    assert limits[0] < 64
    assert 14 <= min(limits) <= 16


def test_answers_that_take_three_times_as_long_do_not_shrink_it() -> None:
    limit = AdaptiveLimit(64)
    for n in range(2_000):
        limit.succeeded(latency_s=0.1 if n < 1_000 else 0.3, in_flight=64)

    assert limit.limit == 64


@given(st.integers(-1, 300), st.lists(st.sampled_from([None, LIMITED, errors.CallTimeout("late")]), max_size=300))
def test_it_never_leaves_one_to_maximum(maximum: int, outcomes: list[CallError | None]) -> None:
    limit = AdaptiveLimit(maximum)
    for outcome in outcomes:
        if outcome is None:
            limit.succeeded(latency_s=0.1, in_flight=limit.limit)
        else:
            limit.failed(outcome)

        assert 1 <= limit.limit <= max(1, maximum)
