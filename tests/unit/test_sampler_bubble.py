"""How long a device stood idle while rows waited, on a clock that tests turn."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from batchmill_workers.gpu.sampler_bubble import BubbleMeter


class Device:
    """A device whose engine is busy when told so."""

    def __init__(self) -> None:
        self.now_ns = self.busy_ns = 0
        self.meter = BubbleMeter(lambda: self.busy_ns, clock=lambda: self.now_ns)

    def idles(self, ns: int) -> None:
        self.now_ns += ns

    def works(self, ns: int) -> None:
        self.now_ns += ns
        self.busy_ns += ns


def test_an_idle_device_without_rows_has_no_bubble() -> None:
    device = Device()
    device.idles(100)
    device.meter.look(False)
    device.idles(100)

    assert device.meter.bubble_ns == 0


def test_idle_time_while_an_attempt_is_held_is_bubble() -> None:
    device = Device()
    with device.meter.holding():
        device.idles(30)
        device.works(100)
        device.idles(5)
        device.works(100)

    assert device.meter.bubble_ns == 35


def test_a_device_that_always_works_has_no_bubble() -> None:
    device = Device()
    with device.meter.holding():
        device.works(100)

    assert device.meter.bubble_ns == 0


def test_attempts_side_by_side_count_idle_time_once() -> None:
    device = Device()
    with ExitStack() as attempts:
        attempts.enter_context(device.meter.holding())
        with device.meter.holding():
            device.idles(10)
        device.idles(10)

    assert device.meter.bubble_ns == 20


def test_rows_that_wait_in_sql_make_idle_time_bubble() -> None:
    device = Device()
    device.meter.look(True)
    device.idles(50)
    device.meter.look(False)
    device.idles(50)

    assert device.meter.bubble_ns == 50


def test_the_gap_between_two_chunks_is_bubble_when_the_next_is_claimed_before_a_look() -> None:
    device = Device()
    with device.meter.holding():
        device.works(10)
    device.idles(7)
    with device.meter.holding():
        device.works(10)

    assert device.meter.bubble_ns == 7


def test_the_time_after_the_last_chunk_is_bubble_when_a_look_finds_more() -> None:
    device = Device()
    with device.meter.holding():
        device.works(10)
    device.idles(7)
    device.meter.look(True)

    assert device.meter.bubble_ns == 7


def test_the_time_after_the_last_chunk_is_none_when_a_look_finds_nothing() -> None:
    device = Device()
    with device.meter.holding():
        device.works(10)
    device.idles(7)
    device.meter.look(False)
    device.idles(1000)
    with device.meter.holding():
        device.works(10)

    assert device.meter.bubble_ns == 0


def test_a_look_says_nothing_while_an_attempt_is_held() -> None:
    device = Device()
    with device.meter.holding():
        device.meter.look(False)
        device.idles(10)

    assert device.meter.bubble_ns == 10
    assert device.meter.needs_look


def test_busy_time_that_is_read_late_takes_nothing_back() -> None:
    device = Device()
    with device.meter.holding():
        device.idles(10)
        before = device.meter.bubble_ns
        device.busy_ns += 10  # of the time before
        device.idles(4)

    assert (before, device.meter.bubble_ns) == (10, 10)


def test_only_an_idle_worker_asks_sql() -> None:
    device = Device()
    asked = [device.meter.needs_look]
    with device.meter.holding():
        asked.append(device.meter.needs_look)

    assert asked == [True, False]


STEPS = st.lists(
    st.tuples(st.sampled_from(["idle", "work", "claim", "release", "ready", "none"]), st.integers(0, 1000))
)


@given(STEPS)
def test_a_bubble_never_falls_and_is_never_more_than_the_idle_time(steps: list[tuple[str, int]]) -> None:
    device, seen = Device(), [0]
    attempts: list[ExitStack] = []
    for what, ns in steps:
        if what == "claim":
            attempts.append(ExitStack())
            attempts[-1].enter_context(device.meter.holding())
        elif what == "release" and attempts:
            attempts.pop().close()
        elif what in ("ready", "none"):
            device.meter.look(what == "ready")
        elif what == "work":
            device.works(ns)
        elif what == "idle":
            device.idles(ns)
        seen.append(device.meter.bubble_ns)

    assert seen == sorted(seen)
    assert seen[-1] <= device.now_ns - device.busy_ns


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000))))
def test_while_an_attempt_is_held_bubble_and_busy_time_make_up_all_time(parts: list[tuple[int, int]]) -> None:
    device = Device()
    with device.meter.holding():
        for idle_ns, busy_ns in parts:
            device.idles(idle_ns)
            device.works(busy_ns)

        assert device.meter.bubble_ns + device.busy_ns == device.now_ns
