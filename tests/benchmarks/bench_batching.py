"""What our batches are worth against batches in order of arrival, on simulated devices, and what planning costs.

Prompts have the skewed lengths of real data sets (log-normal: median 90 tokens, one in a hundred above 900). ``embed``
computes every token of every padded row; ``generate`` takes a step per answer token, hardly longer for many rows.
``python -m tests.benchmarks.bench_batching``; seconds, and the figures but the last do not depend on the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

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


def compare(name: str, cost: Callable[[Batch], int], *, answers: tuple[int, ...], max_padding: float) -> None:
    for in_flight in (2 * BATCH_ROWS, 4 * BATCH_ROWS, 8 * BATCH_ROWS):
        limits = Limits(max_rows=BATCH_ROWS, in_flight=in_flight, max_padding=max_padding)
        arrival, ours = (
            simulate(
                rows(ROWS, answers=answers),
                limits,
                Sizes(row_tokens=UNBOUNDED),
                in_flight=in_flight,
                cost=cost,
                waiting=kind,
            )
            for kind in (ArrivalOrder, WaitingRows)
        )
        print(
            f"{name:<10}{in_flight:>10}  {told(arrival)}  {told(ours)}{arrival.ended_ns / ours.ended_ns:>9.2f}x"
            f"{100 * ours.idle_ns / ours.ended_ns:>9.1f} %"
        )


def told(run: Run) -> str:
    return f"{100 * run.padding:>8.0f} %{ROWS / (run.ended_ns / 1e9):>9.1f}"


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


def main() -> None:
    print(f"{'':<20}  {'arrival order':>20}  {'ours':>20}")
    print(
        f"{'device':<10}{'in flight':>10}  {'padding':>10}{'rows/s':>10}  {'padding':>10}{'rows/s':>10}{'':>10}{'idle':>9}"
    )
    compare("embed", linear(), answers=(0,), max_padding=0.4)
    compare("generate", stepwise(), answers=ANSWERS, max_padding=0.6)
    for waiting_rows in (64, 256, 1024):
        print(f"planning with {waiting_rows} rows waiting: {planning_us(waiting_rows):.0f} us per row")


if __name__ == "__main__":
    main()
