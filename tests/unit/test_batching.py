"""Which waiting rows make up a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_workers.gpu.batching import Batch, Item, Limits, length_class, pick, room


class Fixed:
    """The same budget for every length class."""

    def __init__(self, row_tokens: int) -> None:
        self._row_tokens = row_tokens

    def budget(self, length_class: int) -> int:
        return self._row_tokens


def item(number: int, tokens: int = 10, wanted: int = 0, **more: Any) -> Item:
    return Item(number=number, tokens=tokens, wanted=wanted, **{"arrived_ns": number, **more})


def picked(waiting: Sequence[Item], limits: Limits, budget: int = 10**9) -> Batch:
    kinds: dict[int, list[Item]] = {}
    for one in waiting:
        if one.group == waiting[0].group:
            kinds.setdefault(length_class(one.length), []).append(one)
    return pick(kinds, waiting[0], limits, Fixed(budget))


def numbers(batch: Batch) -> list[int]:
    return [i.number for i in batch.items]


def lengths(*tokens: int) -> list[Item]:
    return [item(n, tokens=t) for n, t in enumerate(tokens)]


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (512, 9), (513, 10), (1024, 10)]
)
def test_a_length_class_holds_lengths_up_to_its_power_of_two(length: int, expected: int) -> None:
    assert length_class(length) == expected


def test_a_batch_takes_up_its_longest_prompt_and_its_longest_answer_for_each_row() -> None:
    batch = Batch(items=(item(1, tokens=100, wanted=10), item(2, tokens=20, wanted=50)))

    assert batch.padded == 150
    assert batch.row_tokens == 300
    assert batch.length_class == 8


@pytest.mark.parametrize(
    ("waiting", "limits", "budget", "expected"),
    [
        pytest.param(lengths(10, 10, 10), Limits(max_rows=2), 10**9, [0, 1], id="as many rows as are allowed"),
        pytest.param(lengths(10, 10, 10), Limits(max_rows=9, max_tokens=25), 10**9, [0, 1], id="as many tokens"),
        pytest.param(lengths(10, 10, 10), Limits(max_rows=9), 29, [0, 1], id="as many as fit by what was learned"),
        pytest.param(lengths(900, 10), Limits(max_rows=9, max_tokens=100), 50, [0], id="a long row goes alone"),
        pytest.param(lengths(100, 4, 90, 5, 110), Limits(max_rows=3), 10**9, [2, 0, 4], id="like lengths together"),
        pytest.param(lengths(100, 4), Limits(max_rows=9, max_padding=0.4), 10**9, [0], id="no batch of padding"),
        pytest.param(lengths(100, 4), Limits(max_rows=9, max_padding=0.6), 10**9, [1, 0], id="as much as is allowed"),
        pytest.param(lengths(100, 60, 50), Limits(max_rows=2), 10**9, [1, 0], id="the nearest of other lengths first"),
    ],
)
def test_a_batch_is_filled_from_the_waiting_rows(
    waiting: Sequence[Item], limits: Limits, budget: int, expected: list[int]
) -> None:
    batch = picked(waiting, limits, budget)

    assert numbers(batch) == expected


def test_rows_that_share_a_prefix_go_before_older_ones_and_stand_together() -> None:
    waiting = [item(n, prefix="ab"[n % 2]) for n in range(6)]
    few = picked(waiting, Limits(max_rows=3))
    all_ = picked(waiting, Limits(max_rows=6))

    assert numbers(few) == [0, 2, 4]
    assert numbers(all_) == [0, 2, 4, 1, 3, 5]


def test_two_rows_that_fit_apart_may_be_too_much_together() -> None:
    long_prompt, long_answer = item(0, tokens=1000, wanted=10), item(1, tokens=10, wanted=1000)

    assert numbers(picked([long_prompt, long_answer], Limits(max_rows=9), 2100)) == [0]


def test_a_batch_without_some_rows_keeps_the_others() -> None:
    batch = Batch(items=(item(1), item(2), item(3)))

    left = batch.without([1, 3])
    assert left is not None
    assert numbers(left) == [2]
    assert batch.without([1, 2, 3]) is None


ITEMS = st.lists(
    st.builds(
        item,
        number=st.integers(0, 10**6),
        tokens=st.integers(0, 5000),
        wanted=st.integers(0, 2000),
        group=st.sampled_from("xy"),
        prefix=st.sampled_from(["", "a", "b"]),
    ),
    min_size=1,
    max_size=60,
    unique_by=lambda i: i.number,
)
LIMITS = st.builds(
    Limits,
    max_rows=st.integers(1, 40),
    max_tokens=st.none() | st.integers(1, 20_000),
    max_padding=st.floats(0, 1),
)


@given(ITEMS, LIMITS, st.integers(1, 10**5))
def test_no_batch_is_over_its_limits_mixes_groups_or_tears_a_prefix_apart(
    waiting: list[Item], limits: Limits, budget: int
) -> None:
    batch = picked(waiting, limits, budget)

    assert waiting[0] in batch.items
    assert len(set(numbers(batch))) == batch.rows
    assert set(batch.items) <= set(waiting)
    assert {i.group for i in batch.items} == {waiting[0].group}
    assert batch.rows <= room(batch.padded, limits, Fixed(budget))
    prefixes = [i.prefix for i in batch.items]
    assert prefixes == sorted(prefixes)
