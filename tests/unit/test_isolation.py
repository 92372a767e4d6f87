"""Who runs beside whom."""

from __future__ import annotations

import asyncio

from batchmill_workers.isolation import Isolation


async def hold(
    isolation: Isolation, inside: list[str], name: str, leave: asyncio.Event, *, alone: bool = False
) -> None:
    async with isolation.entered(alone=alone):
        inside.append(name)
        await leave.wait()
        inside.remove(name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_attempts_run_side_by_side() -> None:
    async def main() -> list[str]:
        isolation, leave = Isolation(), asyncio.Event()
        inside: list[str] = []
        tasks = [asyncio.create_task(hold(isolation, inside, n, leave)) for n in "ab"]
        await settle()
        seen = list(inside)
        leave.set()
        await asyncio.gather(*tasks)
        return seen

    assert asyncio.run(main()) == ["a", "b"]


def test_a_suspect_waits_for_the_others_and_then_runs_alone() -> None:
    async def main() -> list[list[str]]:
        isolation = Isolation()
        inside: list[str] = []
        first, second, third = asyncio.Event(), asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(hold(isolation, inside, "a", first))]
        await settle()
        tasks.append(asyncio.create_task(hold(isolation, inside, "suspect", second, alone=True)))
        await settle()
        tasks.append(asyncio.create_task(hold(isolation, inside, "b", third)))
        await settle()
        seen = [list(inside)]
        for event in (first, second, third):
            event.set()
            await settle()
            seen.append(list(inside))
        await asyncio.gather(*tasks)
        return seen

    assert asyncio.run(main()) == [["a"], ["suspect"], ["b"], []]


def test_a_suspect_that_is_cancelled_while_it_waits_lets_the_others_in() -> None:
    async def main() -> list[str]:
        isolation, leave = Isolation(), asyncio.Event()
        inside: list[str] = []
        running = asyncio.create_task(hold(isolation, inside, "a", leave))
        await settle()
        suspect = asyncio.create_task(hold(isolation, inside, "suspect", leave, alone=True))
        await settle()
        suspect.cancel()
        await settle()
        other = asyncio.create_task(hold(isolation, inside, "b", leave))
        await settle()
        seen = list(inside)
        leave.set()
        await asyncio.gather(running, other)
        return seen

    assert asyncio.run(main()) == ["a", "b"]
