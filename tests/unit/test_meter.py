"""The device meter shares out each moment of busy time in equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_workers.gpu.meter import DeviceMeter


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def test_a_call_alone_is_charged_all_its_time() -> None:
    clock = Clock()
    meter = DeviceMeter(clock)
    token = meter.start()
    clock.now_ns += 500

    assert meter.stop(token) == 500


def test_calls_that_overlap_share_the_time_they_overlap() -> None:
    clock = Clock()
    meter = DeviceMeter(clock)
    first = meter.start()
    clock.now_ns += 100
    second = meter.start()
    clock.now_ns += 60
    shares = meter.stop(first), meter.stop(second)

    assert shares == (130, 30)


def test_idle_time_is_charged_to_no_call() -> None:
    clock = Clock()
    meter = DeviceMeter(clock)
    meter.stop(meter.start())
    clock.now_ns += 10_000
    token = meter.start()
    clock.now_ns += 7

    assert meter.stop(token) == 7
    assert meter.busy_ns == 7


def test_a_call_cannot_be_stopped_twice() -> None:
    meter = DeviceMeter(Clock())
    token = meter.start()
    meter.stop(token)

    with pytest.raises(KeyError):
        meter.stop(token)


@given(events=st.lists(st.tuples(st.integers(0, 10**9), st.integers(-1, 40)), max_size=200))
def test_shares_sum_exactly_to_busy_time(events: list[tuple[int, int]]) -> None:
    clock = Clock()
    meter = DeviceMeter(clock)
    running: list[int] = []
    shares: list[int] = []
    for passed_ns, stop_at in events:
        clock.now_ns += passed_ns
        if 0 <= stop_at < len(running):
            shares.append(meter.stop(running.pop(stop_at)))
        else:
            running.append(meter.start())
    shares += [meter.stop(token) for token in running]

    assert sum(shares) == meter.busy_ns
    assert all(share >= 0 for share in shares)
