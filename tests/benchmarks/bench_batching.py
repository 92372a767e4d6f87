"""What our batches are worth against batches in order of arrival, on simulated devices, and what planning costs.

Prompts have the skewed lengths of real data sets (log-normal: median 90 tokens, one in a hundred above 900). ``embed``
computes every token of every padded row; ``generate`` takes a step per answer token, hardly longer for many rows.
``make bench PYTEST_ARGS=tests/benchmarks/bench_batching.py``; what is simulated is the same on every machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from batchmill_workers.gpu.batching import Batch, Item, Limits
from batchmill_workers.gpu.batching_sizes import Sizes
from batchmill_workers.gpu.batching_waiting import Wait, WaitingRows
from tests.simulated_device import MS, Run, linear, simulate, stepwise

ROWS = 3000
BATCH_ROWS = 32
UNBOUNDED = 10**9
ANSWERS = (16, 64, 256, 512)  # max_tokens of four jobs that run side by side


def rows(count: int, *, answers: tuple[int, ...] = (0,)) -> Iterator[Item]:
    chance = random.Random(1)
    for number in range(count):
        tokens = min(4000, max(4, int(chance.lognormvariate(4.5, 1.0))))
        yield Item(number=number, tokens=tokens, wanted=chance.choice(answers), arrived_ns=0)


class ArrivalOrder(WaitingRows):
    """The first rows that came, as many as a batch holds, whatever their lengths."""

    def next(self, now_ns: int, free_ns: int, last_batch_ns: int | None = None) -> Batch | Wait:
        oldest = list(self._items.values())[: self.limits.max_rows]
        if not oldest:
            return Wait()
        if len(oldest) < self.limits.max_rows and now_ns < self._last_arrival_ns + 5 * MS:
            return Wait(until_ns=self._last_arrival_ns + 5 * MS)
        for item in oldest:
            self.remove(item.number)
        return Batch(items=tuple(oldest))


def ground(cost: Callable[[Batch], int], limits: Limits, kind: type[WaitingRows], answers: tuple[int, ...]) -> Run:
    """All rows on a device of that speed, with memory for any batch."""
    in_flight = limits.in_flight or limits.max_rows
    sizes = Sizes(row_tokens=UNBOUNDED)
    return simulate(rows(ROWS, answers=answers), limits, sizes, in_flight=in_flight, cost=cost, waiting=kind)


@pytest.mark.parametrize("in_flight", [2 * BATCH_ROWS, 4 * BATCH_ROWS, 8 * BATCH_ROWS])
@pytest.mark.parametrize(
    ("name", "cost", "answers", "max_padding"),
    [("embed", linear(), (0,), 0.4), ("generate", stepwise(), ANSWERS, 0.6)],
    ids=["embed", "generate"],
)
def test_batches_of_like_lengths_are_faster_than_those_in_order_of_arrival(
    name: str, cost: Callable[[Batch], int], answers: tuple[int, ...], max_padding: float, in_flight: int
) -> None:
    limits = Limits(max_rows=BATCH_ROWS, in_flight=in_flight, max_padding=max_padding)
    arrival, ours = (ground(cost, limits, kind, answers) for kind in (ArrivalOrder, WaitingRows))
    idle = ours.idle_ns / ours.ended_ns
    print(f"\n{name}, {in_flight} in flight: {told(arrival)} in order of arrival, {told(ours)} ours, idle {idle:.1%}")

    assert arrival.ended_ns / ours.ended_ns > 1.2
    assert idle < 0.02


@pytest.mark.parametrize("waiting", [64, 256, 1024])
def test_planning_costs_little(waiting: int) -> None:
    cost_us = planning_us(waiting)
    print(f"\nplanning with {waiting} rows waiting: {cost_us:.0f} us per row")

    assert cost_us < 1000


def told(run: Run) -> str:
    return f"{ROWS / (run.ended_ns / 1e9):.1f} rows/s with {run.padding:.0%} padding"


def planning_us(waiting_rows: int) -> float:
    """Microseconds per row to put it in line and to plan its batch, with so many rows waiting all the time."""
    supply = rows(waiting_rows + 20 * ROWS, answers=ANSWERS)
    waiting = WaitingRows(Limits(max_rows=BATCH_ROWS, in_flight=waiting_rows, max_padding=0.6), Sizes())
    for item in (next(supply) for _ in range(waiting_rows)):
        waiting.put(item)
    planned, now_ns, began = 0, 0, time.perf_counter()
    while planned < ROWS:
        now_ns += 1000 * MS
        batch = waiting.next(now_ns, now_ns)
        assert isinstance(batch, Batch)
        planned += batch.rows
        for _ in batch.items:
            waiting.put(replace(next(supply), arrived_ns=now_ns))
    return (time.perf_counter() - began) / planned * 1e6
