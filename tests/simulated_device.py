"""A device with so much memory and so much speed, and a worker that keeps it in rows, in simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from batchmill_workers.gpu.batching import Batch, Item, Limits
from batchmill_workers.gpu.batching_sizes import Sizes
from batchmill_workers.gpu.batching_waiting import Wait, WaitingRows

MS = 1_000_000
_MOST_TRIES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One batch that a device took."""

    batch: Batch
    began_ns: int
    ended_ns: int
    fitted: bool


@dataclass(slots=True)
class Run:
    """What came of all rows."""

    ran: list[Ran] = field(default_factory=list)
    arrived_ns: dict[int, int] = field(default_factory=dict)
    too_long: list[Item] = field(default_factory=list)
    idle_ns: int = 0  # while rows waited

    @property
    def fitted(self) -> list[Ran]:
        return [one for one in self.ran if one.fitted]

    @property
    def answered(self) -> list[int]:
        return [item.number for one in self.fitted for item in one.batch.items]

    @property
    def ended_ns(self) -> int:
        return max((one.ended_ns for one in self.ran), default=0)

    @property
    def padding(self) -> float:
        """The share of all row-tokens that was padding."""
        tokens = sum(item.length for one in self.fitted for item in one.batch.items)
        return 1 - tokens / max(1, sum(one.batch.row_tokens for one in self.fitted))


def linear(*, batch_ms: float = 5.0, token_us: float = 2.0) -> Callable[[Batch], int]:
    """Nanoseconds of a batch on a device that computes every token of every padded row, as for embeddings."""
    return lambda batch: int(batch_ms * MS + batch.row_tokens * token_us * 1000)


def stepwise(*, step_ms: float = 10.0, row_us: float = 100.0, token_us: float = 2.0) -> Callable[[Batch], int]:
    """Nanoseconds of a batch that takes a step per token of its longest answer, hardly longer for many rows."""

    def cost(batch: Batch) -> int:
        steps = max(item.wanted for item in batch.items)
        prompts = batch.rows * max(item.tokens for item in batch.items)
        return int(steps * (step_ms * MS + batch.rows * row_us * 1000) + prompts * token_us * 1000)

    return cost


def simulate(
    rows: Iterable[Item],
    limits: Limits,
    sizes: Sizes,
    *,
    in_flight: int,
    cost: Callable[[Batch], int],
    row_tokens: int | None = None,
    turnaround_ms: float = 5.0,
    gap_ms: float = 0.1,
    waiting: Callable[[Limits, Sizes], WaitingRows] = WaitingRows,
) -> Run:
    """Runs the rows on a device where ``row_tokens`` fit at once.

    The worker has ``in_flight`` rows under way at most: it sends the next ``turnaround_ms`` after a batch ended, and
    then one each ``gap_ms``.
    """
    world = _World(Run(), iter(rows), waiting(limits, sizes), gap_ns=int(gap_ms * MS))
    world.send(in_flight, at_ns=0)
    now = free = 0
    last: int | None = None
    for _ in range(_MOST_TRIES):
        world.arrive(now)
        due = world.waiting.next(now, free, last)
        if isinstance(due, Wait):
            until = min((t for t in (due.until_ns, world.next_ns) if t is not None), default=None)
            if until is None:
                return world.run
            world.run.idle_ns += max(0, until - now) if len(world.waiting) else 0
            now = max(until, now + 1)
            continue
        last = cost(due)
        ended = now + last
        fits = row_tokens is None or due.row_tokens <= row_tokens
        world.run.ran.append(Ran(batch=due, began_ns=now, ended_ns=ended, fitted=fits))
        now = free = ended
        world.arrive(now)
        if fits:
            sizes.ran(due, last / 1e9)
            world.send(due.rows, at_ns=now + int(turnaround_ms * MS))
            continue
        halves = sizes.out_of_memory(due)
        world.waiting.again(halves.again)
        if halves.too_long is not None:
            world.run.too_long.append(halves.too_long)
            world.send(1, at_ns=now + int(turnaround_ms * MS))
    raise AssertionError(f"{_MOST_TRIES} steps did not end it")


class _World:
    def __init__(self, run: Run, rows: Iterator[Item], waiting: WaitingRows, *, gap_ns: int) -> None:
        self.run = run
        self.waiting = waiting
        self._rows = rows
        self._gap_ns = gap_ns
        self._coming: list[tuple[int, int, Item]] = []

    @property
    def next_ns(self) -> int | None:
        return self._coming[0][0] if self._coming else None

    def send(self, count: int, *, at_ns: int) -> None:
        for n, item in zip(range(count), self._rows, strict=False):
            when = at_ns + n * self._gap_ns
            heapq.heappush(self._coming, (when, item.number, replace(item, arrived_ns=when)))

    def arrive(self, now_ns: int) -> None:
        while self._coming and self._coming[0][0] <= now_ns:
            when, number, item = heapq.heappop(self._coming)
            self.run.arrived_ns[number] = when
            self.waiting.put(item)
