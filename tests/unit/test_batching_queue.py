"""The batcher between two threads: one puts rows in, the other takes batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from batchmill_workers.gpu.batching import Batch, Item, Limits
from batchmill_workers.gpu.batching_queue import Batcher
from batchmill_workers.gpu.batching_sizes import Sizes

DEADLINE_S = 30.0
# A row waits for a minute, so that what goes sooner went for another reason.
PATIENT = Limits(max_rows=4, max_wait_ms=60_000, settle_ms=60_000)
QUICK = Limits(max_rows=4, max_wait_ms=0, settle_ms=0)


def item(number: int, *, tokens: int = 10) -> Item:
    return Item(number=number, tokens=tokens, arrived_ns=time.monotonic_ns())


def put(batcher: Batcher, *numbers: int) -> None:
    for number in numbers:
        batcher.put(item(number))


def take(batcher: Batcher) -> Batch:
    batch = batcher.take(DEADLINE_S)
    assert batch is not None
    return batch


def numbers(batch: Batch | None) -> list[int]:
    return [] if batch is None else sorted(i.number for i in batch.items)


class Taker:
    """A thread that takes once."""

    def __init__(self, batcher: Batcher) -> None:
        self._taken: list[Batch | None] = []
        self._thread = threading.Thread(target=lambda: self._taken.append(batcher.take()))
        self._thread.start()

    def result(self) -> Batch | None:
        self._thread.join(DEADLINE_S)
        assert self._taken, "nothing was taken"
        return self._taken[0]


@pytest.fixture
def make() -> Iterator[Callable[..., Batcher]]:
    """Makes batchers that are closed after the test, so that no thread of it waits for ever."""
    made: list[Batcher] = []

    def build(limits: Limits = QUICK, sizes: Sizes | None = None) -> Batcher:
        made.append(Batcher(limits, sizes))
        return made[-1]

    yield build
    for batcher in made:
        batcher.close()


Make = Callable[..., Batcher]


def test_a_taker_wakes_when_a_batch_is_full(make: Make) -> None:
    batcher = make(PATIENT)
    taker = Taker(batcher)
    put(batcher, 1, 2, 3, 4)

    assert numbers(taker.result()) == [1, 2, 3, 4]


def test_a_taker_wakes_when_its_row_has_waited_its_time(make: Make) -> None:
    batcher = make(Limits(max_rows=4, max_wait_ms=20, settle_ms=60_000))
    taker = Taker(batcher)
    put(batcher, 1)

    assert numbers(taker.result()) == [1]


def test_a_batch_waits_while_requests_are_being_read(make: Make) -> None:
    batcher = make(Limits(max_rows=8, max_wait_ms=60_000, settle_ms=1))
    taker = Taker(batcher)
    with batcher.reading(3):
        put(batcher, 1, 2, 3)
    put(batcher, 4)

    assert numbers(taker.result())[:3] == [1, 2, 3]


def test_reading_ends_though_a_request_was_refused(make: Make) -> None:
    batcher = make(Limits(max_rows=8, max_wait_ms=60_000, settle_ms=0))
    put(batcher, 1)
    with pytest.raises(ValueError, match="no template"), batcher.reading(2):
        raise ValueError("no template")

    assert numbers(take(batcher)) == [1]


def test_nothing_is_taken_when_nothing_is_due_in_time(make: Make) -> None:
    batcher = make(PATIENT)
    put(batcher, 1)

    assert batcher.take(timeout_s=0.01) is None
    assert batcher.waiting == 1


def test_a_taker_is_released_when_the_batcher_is_closed(make: Make) -> None:
    batcher = make(PATIENT)
    put(batcher, 1)
    taker = Taker(batcher)
    batcher.close()

    assert taker.result() is None
    assert batcher.closed
    assert batcher.take() is None


def test_a_cancelled_row_is_not_taken(make: Make) -> None:
    batcher = make()
    put(batcher, 1, 2)

    assert batcher.cancel(1)
    assert numbers(take(batcher)) == [2]


def test_a_row_is_cancelled_while_it_runs_for_as_long_as_its_batch_only(make: Make) -> None:
    batcher = make()
    put(batcher, 1, 2)
    batch = take(batcher)

    assert not batcher.cancel(1)
    assert not batcher.cancel(99)
    batcher.ran(batch, 0.1)
    put(batcher, 1, 2)
    batcher.out_of_memory(take(batcher))
    assert [numbers(take(batcher)), numbers(take(batcher))] == [[1], [2]]


def test_a_row_that_was_cancelled_is_remembered_when_another_batch_ends(make: Make) -> None:
    batcher = make()
    put(batcher, 1, 2, 3, 4, 5)
    first, second = take(batcher), take(batcher)
    for number in (1, 5):
        batcher.cancel(number)
    batcher.failed(second)
    batcher.out_of_memory(first)

    assert [numbers(take(batcher)), numbers(take(batcher))] == [[2], [3, 4]]


def test_the_halves_of_a_batch_that_failed_come_before_other_rows_until_one_row_fails_alone(
    make: Callable[..., Batcher],
) -> None:
    batcher = make()
    put(batcher, 1, 2, 3, 4)
    batch = take(batcher)
    put(batcher, 5)
    batcher.cancel(4)
    assert batcher.failed(batch, answered=[1]) is None
    first, second = take(batcher), take(batcher)
    ended = batcher.failed(first)

    assert (numbers(first), numbers(second), numbers(take(batcher))) == ([2], [3], [5])
    assert ended is not None
    assert ended.number == 2


def test_a_device_that_computes_takes_what_is_due_without_waiting(make: Make) -> None:
    batcher = make(PATIENT)
    assert batcher.take(0) is None
    put(batcher, 1, 2, 3)
    assert batcher.take(0) is None
    put(batcher, 4)

    assert numbers(batcher.take(0)) == [1, 2, 3, 4]
    assert batcher.bubble_ns == 0


def test_a_device_that_computes_does_not_give_rows_that_came_a_while_ago_more_time(make: Make) -> None:
    batcher = make(Limits(max_rows=4, max_wait_ms=60_000, settle_ms=1))
    batcher.put(Item(number=1, tokens=10, arrived_ns=time.monotonic_ns() - 5_000_000))

    assert numbers(batcher.take(0)) == [1]


def test_what_did_not_fit_comes_again_in_halves_without_what_needs_no_answer(make: Make) -> None:
    batcher = make()
    put(batcher, 1, 2, 3, 4)
    batch = take(batcher)
    batcher.cancel(2)

    assert batcher.out_of_memory(batch, answered=[3]) is None
    assert [numbers(take(batcher)), numbers(take(batcher))] == [[1], [4]]
    assert batcher.waiting == 0


def test_a_row_that_fits_in_no_way_comes_back_to_the_caller(make: Make) -> None:
    batcher = make()
    put(batcher, 7)
    assert batcher.out_of_memory(take(batcher)) is None
    too_long = batcher.out_of_memory(take(batcher))

    assert too_long is not None
    assert too_long.number == 7
    assert batcher.waiting == 0


def test_a_row_that_nobody_waits_for_is_not_called_too_long(make: Make) -> None:
    batcher = make()
    put(batcher, 7)
    batcher.out_of_memory(take(batcher))
    last = take(batcher)
    batcher.cancel(7)

    assert batcher.out_of_memory(last) is None


def test_what_was_learned_goes_in_and_comes_out(make: Make) -> None:
    batcher = make(Limits(max_rows=100, max_wait_ms=0, settle_ms=0))
    batcher.use({4: 2})
    for number in range(4):
        batcher.put(item(number, tokens=16))
    batch = take(batcher)
    batcher.ran(batch, 0.1)

    assert batch.rows == 2
    assert batcher.learned() == {4: 2}


def test_figures_say_how_large_batches_are_and_how_long_the_device_was_free_while_rows_waited(make: Make) -> None:
    batcher = make(Limits(max_rows=2, max_wait_ms=20, settle_ms=60_000))
    put(batcher, 1, 2, 3)
    take(batcher)
    assert batcher.batch_rows == 2.0
    full_ns = batcher.bubble_ns
    take(batcher)

    assert batcher.batch_rows is not None
    assert 1 < batcher.batch_rows < 2
    assert batcher.bubble_ns > full_ns


def test_every_row_of_several_readers_is_taken_once(make: Make) -> None:
    batcher = make(Limits(max_rows=7, max_wait_ms=1, settle_ms=0))
    rows, readers = 200, 4
    threads = [threading.Thread(target=put, args=(batcher, *range(n * rows, (n + 1) * rows))) for n in range(readers)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < rows * readers:
        batch = take(batcher)
        batcher.ran(batch, 0.001)
        taken += numbers(batch)
    for thread in threads:
        thread.join()

    assert sorted(taken) == list(range(rows * readers))
