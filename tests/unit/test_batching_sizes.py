"""How much fits on a device is found by trying, on simulated devices of known memory and speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill_workers.gpu.batching import Batch, Item, Limits, length_class
from batchmill_workers.gpu.batching_sizes import Halves, Sizes
from tests.simulated_device import linear, simulate

LENGTH = 128
CLASS = length_class(LENGTH)


@cache
def batch(rows: int, *, length: int = LENGTH) -> Batch:
    return Batch(items=tuple(Item(number=n, tokens=length, arrived_ns=0) for n in range(rows)))


def faster_when_larger(batch: Batch) -> float:
    return 1.0 + batch.row_tokens / 1e6


def no_faster(batch: Batch) -> float:
    return batch.row_tokens / 1e6


def full(sizes: Sizes, *, length: int = LENGTH) -> Batch:
    """A batch that uses up what may run at once."""
    return batch(max(1, sizes.budget(length_class(length)) // length), length=length)


def grind(
    sizes: Sizes, fits: int, *, times: int, seconds: Callable[[Batch], float] = faster_when_larger
) -> tuple[int, int]:
    """Runs full batches on a device where ``fits`` row-tokens fit; how many failed, and the largest that ran."""
    failed = most = 0
    for _ in range(times):
        one = full(sizes)
        if one.row_tokens > fits:
            failed += 1
            sizes.out_of_memory(one)
        else:
            most = max(most, one.row_tokens)
            sizes.ran(one, seconds(one))
    return failed, most


def test_the_first_guess_is_what_memory_says() -> None:
    assert Sizes(row_tokens=5000).budget(CLASS) == 5000
    assert Sizes().budget(CLASS) == Sizes().budget(CLASS + 3) > 0


def test_a_size_grows_while_larger_batches_are_faster() -> None:
    sizes = Sizes(row_tokens=1000)
    grind(sizes, fits=10**9, times=20)

    assert sizes.budget(CLASS) > 100_000


def test_a_size_does_not_grow_when_larger_batches_are_no_faster() -> None:
    sizes = Sizes(row_tokens=1024)
    grind(sizes, fits=10**9, times=40, seconds=no_faster)

    assert sizes.budget(CLASS) == 1024


def test_a_size_does_not_grow_by_batches_that_are_not_full() -> None:
    sizes = Sizes(row_tokens=8 * LENGTH)
    for _ in range(50):
        sizes.ran(batch(7), 1.0)

    assert sizes.budget(CLASS) == 8 * LENGTH


def test_answers_that_ended_early_count_as_what_was_computed() -> None:
    honest, cut = Sizes(row_tokens=1024), Sizes(row_tokens=1024)
    for _ in range(4):
        one = full(cut)
        cut.ran(one, 1.0, computed=100)  # larger batches took the same time, for the same few tokens
        honest.ran(full(honest), 1.0)

    assert cut.budget(CLASS) == 1024 < honest.budget(CLASS)


def test_growth_is_bounded() -> None:
    sizes = Sizes(row_tokens=1000, most_row_tokens=5000)
    grind(sizes, fits=10**9, times=50)

    assert 4000 <= sizes.budget(CLASS) <= 5000


def test_what_did_not_fit_is_halved() -> None:
    sizes = Sizes(row_tokens=10 * LENGTH)
    halves = sizes.out_of_memory(batch(10))

    assert [b.rows for b in halves.again] == [5, 5]
    assert [i.number for b in halves.again for i in b.items] == list(range(10))
    assert halves.too_long is None
    assert sizes.budget(CLASS) == 5 * LENGTH


def test_a_size_that_worked_is_kept_when_a_larger_one_fails() -> None:
    sizes = Sizes(row_tokens=8 * LENGTH)
    sizes.ran(batch(8), 1.0)
    sizes.out_of_memory(batch(10))

    assert sizes.budget(CLASS) == 8 * LENGTH


def test_a_size_that_worked_is_halved_when_it_fits_no_more() -> None:
    sizes = Sizes(row_tokens=8 * LENGTH)
    sizes.ran(batch(8), 1.0)
    sizes.out_of_memory(batch(8))

    assert sizes.budget(CLASS) == 4 * LENGTH


def test_a_row_that_does_not_fit_alone_is_tried_once_more_and_then_too_long() -> None:
    sizes = Sizes()
    (again,) = sizes.out_of_memory(batch(1)).again

    assert again.last_try
    assert sizes.out_of_memory(again) == Halves(too_long=again.items[0])


def test_halving_ends_with_each_row_alone() -> None:
    sizes = Sizes()
    left, too_long = [batch(37)], []
    while left:
        halves = sizes.out_of_memory(left.pop())
        left += halves.again
        too_long += [halves.too_long] if halves.too_long else []

    assert sorted(i.number for i in too_long) == list(range(37))
    assert sizes.budget(CLASS) >= 1


def test_what_failed_is_not_tried_again_soon() -> None:
    sizes = Sizes(row_tokens=1024)
    grind(sizes, fits=10_000, times=100)
    failed, _ = grind(sizes, fits=10_000, times=1000)

    assert failed <= 4


def test_memory_that_became_free_is_found() -> None:
    sizes = Sizes(row_tokens=1024)
    grind(sizes, fits=10_000, times=100)
    _, most = grind(sizes, fits=40_000, times=2000)

    assert most > 20_000


def test_a_new_length_class_starts_from_what_its_neighbour_learned() -> None:
    sizes = Sizes(row_tokens=1000)
    grind(sizes, fits=50_000, times=200)

    assert sizes.budget(CLASS + 1) == sizes.budget(CLASS - 2) == sizes.budget(CLASS)


def test_learned_are_rows_of_the_full_length_of_a_class() -> None:
    sizes = Sizes(row_tokens=10_000)
    sizes.ran(batch(10, length=100), 1.0)
    sizes.ran(batch(2, length=1000), 1.0)

    assert sizes.learned() == {7: 7, 10: 1}


def test_nothing_is_learned_from_what_failed() -> None:
    sizes = Sizes(row_tokens=10_000)
    sizes.out_of_memory(batch(10))

    assert sizes.learned() == {}


def test_what_was_learned_before_is_used_and_learned_again() -> None:
    sizes = Sizes(row_tokens=1000)
    sizes.use({7: 64, 10: 3})

    assert sizes.budget(7) == 64 * 128
    assert sizes.budget(10) == 3 * 1024
    assert sizes.learned() == {7: 64, 10: 3}


def test_a_size_learned_before_is_not_grown_at_once() -> None:
    sizes = Sizes()
    sizes.use({CLASS: 64})
    failed, _ = grind(sizes, fits=64 * LENGTH, times=50)

    assert failed == 0


@pytest.mark.parametrize("rows", [{7: 0}, {7: -3}, {-1: 5}, {99: 5}])
def test_sizes_that_make_no_sense_are_left_aside(rows: dict[int, int]) -> None:
    sizes = Sizes(row_tokens=1000)
    sizes.use(rows)

    assert sizes.budget(7) == 1000
    assert sizes.learned() == {}


@settings(max_examples=50, deadline=None)
@given(guess=st.integers(1, 10**5), fits=st.integers(2 * LENGTH, 50_000))
def test_sizes_come_near_to_what_fits_with_few_failures(guess: int, fits: int) -> None:
    sizes = Sizes(row_tokens=guess)
    failed, _ = grind(sizes, fits, times=300)
    room = fits // LENGTH * LENGTH  # whole rows

    assert 0.7 * room - LENGTH <= sizes.learned()[CLASS] * LENGTH <= fits
    assert failed <= 8 + max(0, math.log2(guess / fits))


@settings(max_examples=25, deadline=None)
@given(st.integers(200, 20_000), st.integers(1, 10**5), st.lists(st.integers(1, 4000), min_size=1, max_size=200))
def test_a_device_of_any_size_gets_through_rows_of_any_length(fits: int, guess: int, lengths: list[int]) -> None:
    rows = [Item(number=n, tokens=tokens, arrived_ns=0) for n, tokens in enumerate(lengths)]
    run = simulate(
        rows, Limits(max_rows=64), Sizes(row_tokens=guess), in_flight=128, cost=linear(), row_tokens=fits, gap_ms=0.0
    )

    assert sorted(i.number for i in run.too_long) == [n for n, tokens in enumerate(lengths) if tokens > fits]
    assert len(run.answered) + len(run.too_long) == len(lengths)
