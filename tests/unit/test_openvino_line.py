"""Which waiting rows OpenVINO's batch takes: free places, prefixes that are being computed, schemas on trial."""

from __future__ import annotations

from batchmill_workers.gpu.openvino_line import BLOCK_TOKENS, Line, blocks

SHARED = list(range(3 * BLOCK_TOKENS))


def prompt(*ends: int) -> list[int]:
    """A prompt that shares three blocks with the others and has one of its own for each end."""
    return SHARED + [end for end in ends for _ in range(BLOCK_TOKENS)]


def line(*, places: int = 8, prefixes: bool = True) -> Line:
    return Line(places=places, prefixes=prefixes)


def test_rows_go_in_the_order_of_their_arrival_while_places_are_free() -> None:
    one = line(places=2)
    for number in (7, 5, 6):
        one.put(number, [number])

    assert list(one.take()) == [7, 5]
    one.leaves(7)
    assert list(one.take()) == [6]


def test_rows_wait_for_the_one_that_computes_their_prefix() -> None:
    one = line()
    for number in range(3):
        one.put(number, prompt(1000 + number))
    first = list(one.take())
    one.prompt_is_computed(0)

    assert first == [0]
    assert list(one.take()) == [1, 2]


def test_a_row_with_another_beginning_passes_those_that_wait() -> None:
    one = line()
    one.put(0, prompt(1))
    one.put(1, prompt(2))
    one.put(2, [9] * 100)

    assert list(one.take()) == [0, 2]


def test_a_prefix_that_is_in_the_cache_is_waited_for_no_more() -> None:
    one = line()
    one.put(0, prompt(1))
    list(one.take())
    one.prompt_is_computed(0)
    one.leaves(0)
    one.put(1, prompt(2))
    one.put(2, prompt(3))

    assert list(one.take()) == [1, 2]


def test_when_the_one_that_computes_a_prefix_is_cancelled_the_next_computes_it() -> None:
    one = line()
    for number in range(3):
        one.put(number, prompt(number))
    list(one.take())
    one.leaves(0)

    assert list(one.take()) == [1]


def test_without_a_cache_of_prefixes_nobody_waits_for_them() -> None:
    one = line(prefixes=False)
    for number in range(3):
        one.put(number, prompt(number))

    assert list(one.take()) == [0, 1, 2]


def test_a_row_that_left_the_line_never_goes() -> None:
    one = line()
    one.put(0, prompt(1))
    one.put(1, prompt(2))
    one.remove(0)
    one.remove(5)

    assert list(one.take()) == [1]


def test_a_schema_that_nobody_has_tried_is_tried_alone() -> None:
    one = line()
    one.put(0, [0])
    one.put(1, [1], schema="a")
    one.put(2, [2], schema="a")
    one.put(3, [3])

    assert list(one.take()) == [0]
    one.prompt_is_computed(0)
    assert list(one.take()) == []
    one.leaves(0)
    assert list(one.take()) == [1]
    assert one.on_trial == 1
    assert list(one.take()) == []
    one.prompt_is_computed(1)
    assert one.on_trial is None
    assert list(one.take()) == [2, 3]


def test_a_schema_whose_trial_was_cancelled_is_tried_by_the_next() -> None:
    one = line()
    one.put(0, [0], schema="a")
    one.put(1, [1], schema="a")
    list(one.take())
    one.leaves(0)

    assert list(one.take()) == [1]
    assert one.on_trial == 1


def test_a_block_stands_for_all_tokens_before_its_end() -> None:
    other = [7, *SHARED[1:]]

    assert len(blocks([*SHARED, 1])) == 3
    assert not set(blocks(SHARED)) & set(blocks(other))
    assert blocks(SHARED) == blocks(prompt(1))[:3]
    assert blocks([1] * (BLOCK_TOKENS - 1)) == []
