"""The gate of rows that are booked and not finished."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from batchmill_workers.window import Window


def on_loop(act: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(act, 5))


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_rows_enter_at_once_while_there_is_room() -> None:
    async def act() -> None:
        window = Window(4)

        await window.take(3)
        await window.take(1)

        assert window.taken == 4

    on_loop(act())


def test_who_finds_no_room_waits_until_some_is_given_back() -> None:
    async def act() -> None:
        window = Window(2)
        await window.take(2)
        waiting = asyncio.create_task(window.take(2))
        await settle()
        window.give()
        await settle()
        early = waiting.done()

        window.give()
        await waiting

        assert not early
        assert window.taken == 2

    on_loop(act())


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    async def act() -> None:
        window, order = Window(4), []
        await window.take(3)

        async def enter(name: str, count: int) -> None:
            await window.take(count)
            order.append(name)

        tasks = [asyncio.create_task(enter("large", 3)), asyncio.create_task(enter("small", 1))]
        await settle()
        early = list(order)
        window.give(3)
        await asyncio.gather(*tasks)

        assert early == []
        assert order == ["large", "small"]

    on_loop(act())


def test_who_stops_waiting_takes_nothing_and_holds_nobody_up() -> None:
    async def act() -> None:
        window = Window(1)
        await window.take(1)
        first, second = asyncio.create_task(window.take(1)), asyncio.create_task(window.take(1))
        await settle()

        first.cancel()
        await settle()
        window.give()
        await second

        assert window.taken == 1

    on_loop(act())


def test_who_is_cancelled_just_when_its_turn_came_gives_the_room_back() -> None:
    async def act() -> None:
        window = Window(1)
        await window.take(1)
        late = asyncio.create_task(window.take(1))
        await settle()

        window.give()
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late

        assert window.taken == 0

    on_loop(act())


@pytest.mark.parametrize(("in_flight", "limit"), [(1, 9), (8, 16), (100, 200), (256, 512), (2000, 2256)])
def test_a_few_rows_are_booked_ahead_of_those_in_flight(in_flight: int, limit: int) -> None:
    assert Window.for_capacity(in_flight).limit == limit


@pytest.mark.parametrize(("limit", "batch"), [(1, 1), (9, 2), (64, 16), (512, 32)])
def test_rows_are_booked_in_batches_that_leave_room(limit: int, batch: int) -> None:
    assert Window(limit).batch == batch
