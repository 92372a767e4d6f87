"""When a batch goes, and that every row goes once, by a clock that the tests turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill_workers.gpu.batching import Batch, Item, Limits
from batchmill_workers.gpu.batching_sizes import Sizes
from batchmill_workers.gpu.batching_waiting import Wait, WaitingRows
from tests.simulated_device import MS, Run, linear, simulate

LIMITS = Limits(max_rows=4, max_wait_ms=50, settle_ms=5)


def item(number: int, *, at_ms: float = 0, tokens: int = 10, group: str = "") -> Item:
    return Item(number=number, tokens=tokens, arrived_ns=int(at_ms * MS), group=group)


def rows(*items: Item, limits: Limits = LIMITS) -> WaitingRows:
    waiting = WaitingRows(limits, Sizes())
    for one in items:
        waiting.put(one)
    return waiting


def went(due: Batch | Wait) -> list[int]:
    assert isinstance(due, Batch), due
    return sorted(i.number for i in due.items)


def waits_until_ms(due: Batch | Wait) -> float | None:
    assert isinstance(due, Wait), due
    return None if due.until_ns is None else due.until_ns / MS


def test_nothing_goes_while_nothing_waits() -> None:
    assert waits_until_ms(rows().next(0, 0)) is None


def test_a_full_batch_goes_at_once() -> None:
    waiting = rows(*(item(n) for n in range(5)))

    assert went(waiting.next(0, 0)) == [0, 1, 2, 3]
    assert len(waiting) == 1


def test_a_batch_is_full_when_its_tokens_are_used_up() -> None:
    waiting = rows(*(item(n, tokens=100) for n in range(3)), limits=replace(LIMITS, max_tokens=300))

    assert went(waiting.next(0, 0)) == [0, 1, 2]


def test_a_few_rows_go_when_nothing_came_for_a_while() -> None:
    waiting = rows(item(0), item(1, at_ms=3))

    assert waits_until_ms(waiting.next(4 * MS, 0)) == 8
    assert went(waiting.next(8 * MS, 0)) == [0, 1]


def test_rows_that_keep_coming_hold_a_batch_for_no_longer_than_the_oldest_may_wait() -> None:
    waiting = WaitingRows(replace(LIMITS, max_rows=100), Sizes())
    for n in range(13):
        waiting.put(item(n, at_ms=4 * n))
        assert waits_until_ms(waiting.next(4 * n * MS, 0)) == min(4 * n + 5, 50)

    assert len(went(waiting.next(50 * MS, 0))) == 13


def test_a_batch_waits_for_requests_that_are_being_tokenised() -> None:
    waiting = rows(item(0))
    waiting.coming = 3

    assert waits_until_ms(waiting.next(20 * MS, 0)) == 50
    assert went(waiting.next(50 * MS, 0)) == [0]


def test_a_batch_goes_at_once_when_the_worker_can_send_no_more() -> None:
    waiting = rows(item(0), item(1), limits=replace(LIMITS, in_flight=2))

    assert went(waiting.next(0, 0)) == [0, 1]


def test_a_device_that_has_just_become_free_lets_the_next_rows_arrive() -> None:
    """Else one left over from the batch before would go alone, and the others after it, for ever."""
    waiting = rows(item(0))

    assert waits_until_ms(waiting.next(1000 * MS, 1000 * MS, 900 * MS)) == 1005
    waiting.put(item(1, at_ms=1002))
    assert went(waiting.next(1005 * MS, 1000 * MS, 900 * MS)) == [0, 1]


def test_a_device_idles_for_no_more_than_a_hundredth_of_its_last_batch() -> None:
    assert waits_until_ms(rows(item(0)).next(1000 * MS, 1000 * MS, 100 * MS)) == 1001


def test_a_full_batch_goes_before_an_older_row_that_has_time() -> None:
    waiting = rows(item(0, tokens=1000), *(item(n, at_ms=1) for n in range(1, 5)))

    assert went(waiting.next(2 * MS, 0)) == [1, 2, 3, 4]


def test_a_row_that_waited_too_long_goes_before_a_full_batch() -> None:
    waiting = rows(item(0, tokens=1000), *(item(n, at_ms=1) for n in range(1, 5)))

    assert went(waiting.next(50 * MS, 0)) == [0]


def test_rows_of_two_groups_go_in_two_batches() -> None:
    waiting = rows(item(0, group="a"), item(1, group="b"), item(2, group="a"))

    assert went(waiting.next(60 * MS, 0)) == [0, 2]
    assert went(waiting.next(60 * MS, 0)) == [1]


def test_batches_to_be_run_again_go_first_and_as_they_are() -> None:
    waiting = rows(item(0))
    waiting.again([Batch(items=(item(7), item(8, tokens=900)))])

    assert len(waiting) == 3
    assert went(waiting.next(0, 0)) == [7, 8]


def test_a_removed_row_does_not_go_wherever_it_waits() -> None:
    waiting = rows(item(0), item(1))
    waiting.again([Batch(items=(item(7), item(8))), Batch(items=(item(9),))])

    assert [waiting.remove(n) for n in (0, 8, 9, 5)] == [True, True, True, False]
    assert went(waiting.next(0, 0)) == [7]
    assert went(waiting.next(60 * MS, 0)) == [1]


def test_a_row_is_put_once() -> None:
    with pytest.raises(ValueError, match="row 3 waits already"):
        rows(item(3), item(3))


SETTINGS = settings(max_examples=60, deadline=None)
ROWS = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from([0, 16, 400]), st.sampled_from("xy"), st.sampled_from(["", "p"])),
    max_size=80,
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, Limits, int]:
    """A worker with a simulated device that ran some rows, its limits, and how many rows there were."""
    limits = Limits(
        max_rows=draw(st.integers(1, 16)),
        max_tokens=draw(st.none() | st.integers(100, 20_000)),
        max_wait_ms=draw(st.sampled_from([0, 1, 50, 1000])),
        settle_ms=draw(st.sampled_from([0, 1, 5])),
        max_padding=draw(st.sampled_from([0.0, 0.4, 1.0])),
    )
    drawn = draw(ROWS)
    items = [
        Item(number=n, tokens=tokens, wanted=wanted, group=group, prefix=prefix, arrived_ns=0)
        for n, (tokens, wanted, group, prefix) in enumerate(drawn)
    ]
    run = simulate(
        items,
        limits,
        Sizes(row_tokens=draw(st.integers(1, 50_000))),
        in_flight=draw(st.integers(1, 40)),
        cost=linear(batch_ms=draw(st.sampled_from([1, 20])), token_us=draw(st.sampled_from([1, 50]))),
        row_tokens=draw(st.none() | st.integers(500, 20_000)),
        gap_ms=draw(st.sampled_from([0.0, 0.5, 3.0])),
    )
    return run, limits, len(items)


@SETTINGS
@given(runs())
def test_every_row_is_answered_once_or_too_long(ran: tuple[Run, Limits, int]) -> None:
    run, _, count = ran

    assert sorted(run.answered + [i.number for i in run.too_long]) == list(range(count))


@SETTINGS
@given(runs())
def test_no_batch_is_over_the_limits(ran: tuple[Run, Limits, int]) -> None:
    run, limits, _ = ran
    for one in run.ran:
        batch = one.batch

        assert batch.rows <= limits.max_rows
        assert batch.rows == 1 or limits.max_tokens is None or batch.row_tokens <= limits.max_tokens
        assert len({i.group for i in batch.items}) == 1


@SETTINGS
@given(runs())
def test_no_row_that_waited_its_time_is_passed_over_by_younger_ones(ran: tuple[Run, Limits, int]) -> None:
    """So a row waits for no more than ``max_wait_ms`` and one batch once it is the oldest."""
    run, limits, _ = ran
    gone_ns = {i.number: one.began_ns for one in reversed(run.ran) for i in one.batch.items}
    failed: set[int] = set()
    for one in run.ran:
        halved = any(i.number in failed for i in one.batch.items)
        failed.update(i.number for i in one.batch.items if not one.fitted)
        if halved:  # what did not fit goes on before all others
            continue
        oldest_ns = min(run.arrived_ns[i.number] for i in one.batch.items)
        overdue_ns = one.began_ns - int(limits.max_wait_ms * MS)
        waiting = [
            run.arrived_ns[n] for n, ns in gone_ns.items() if ns > one.began_ns and run.arrived_ns[n] < oldest_ns
        ]

        assert all(arrived_ns > overdue_ns for arrived_ns in waiting)


@SETTINGS
@given(runs())
def test_a_free_device_waits_for_no_longer_than_the_oldest_row_may(ran: tuple[Run, Limits, int]) -> None:
    run, limits, _ = ran
    free_ns = 0
    for one in run.ran:
        oldest_ns = min(run.arrived_ns[i.number] for i in one.batch.items)
        by_age_ns = oldest_ns + int(limits.max_wait_ms * MS)

        assert one.began_ns <= max(by_age_ns, free_ns + int(limits.settle_ms * MS), oldest_ns) + 1
        free_ns = one.ended_ns


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(["put", "cancel", "next"]), st.integers(0, 12)), max_size=80))
def test_a_row_goes_once_unless_it_was_cancelled_before(steps: list[tuple[str, int]]) -> None:
    waiting = WaitingRows(LIMITS, Sizes())
    put: set[int] = set()
    gone: list[int] = []
    for what, number in steps:
        if what == "put" and number not in put:
            put.add(number)
            waiting.put(item(number, tokens=1 + 50 * number))
        elif what == "cancel" and waiting.remove(number):
            gone.append(number)
        elif what == "next" and isinstance(due := waiting.next(100 * MS, 0), Batch):
            gone += [i.number for i in due.items]
    while isinstance(due := waiting.next(100 * MS, 0), Batch):
        gone += [i.number for i in due.items]

    assert sorted(gone) == sorted(put)
    assert len(waiting) == 0
