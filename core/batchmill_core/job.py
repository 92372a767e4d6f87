"""Job and Chunk values, their states and the one transition table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .errors import JobError
from .request import TaskKind
from .usage import Price

CONTRACT_VERSION = 1


class JobState(StrEnum):
    """``failed``: its loader died before it was opened. What a bad key, model, budget or source stopped is ``paused``."""

    LOADING = "loading"
    OPEN = "open"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class ChunkState(StrEnum):
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"


JOB_TRANSITIONS: Mapping[JobState, Mapping[JobState, str]] = {
    JobState.LOADING: {
        JobState.OPEN: "the producer, when every row is read, valid and saved; of an eager job when the first rows are",
        JobState.FAILED: "the dispatcher, when its loader died and no key can go on with it",
        JobState.CANCELLED: "the user",
    },
    JobState.OPEN: {
        JobState.PAUSED: "the user, a worker with a reason (key, model, budget), or whoever finds its source failed",
        JobState.DONE: "the dispatcher, when its data set is read and no chunk is ready or leased",
        JobState.CANCELLED: "the user",
    },
    JobState.PAUSED: {
        JobState.OPEN: "the user by resume, the dispatcher when the account is healed, or who goes on with its source",
        JobState.CANCELLED: "the user",
    },
    JobState.DONE: {JobState.OPEN: "the user by retry: the next round"},
    JobState.CANCELLED: {},
    JobState.FAILED: {JobState.LOADING: "the producer, when the same key is submitted again"},
}

CHUNK_TRANSITIONS: Mapping[ChunkState, Mapping[ChunkState, str]] = {
    ChunkState.READY: {
        ChunkState.LEASED: "a worker by claim",
        ChunkState.DONE: "the dispatcher by merge: its rows live on in another chunk",
        ChunkState.CANCELLED: "cancel",
    },
    ChunkState.LEASED: {
        ChunkState.READY: "the dispatcher, when its lease expired",
        ChunkState.DONE: "its worker by release, or the dispatcher by halving; unfinished rows become child chunks",
        ChunkState.DEAD: "the dispatcher, when it crashed workers and has one row left",
        ChunkState.CANCELLED: "the dispatcher, when its lease expired and the job was cancelled",
    },
    ChunkState.DONE: {},
    ChunkState.DEAD: {ChunkState.DONE: "a retry that takes its row up again, or a late paid answer of that row"},
    ChunkState.CANCELLED: {},
}

FINAL_JOB_STATES = frozenset({JobState.DONE, JobState.CANCELLED, JobState.FAILED})


def sources_of(target: JobState) -> tuple[JobState, ...]:
    """The states from which a job may move to ``target``."""
    return tuple(s for s, nexts in JOB_TRANSITIONS.items() if target in nexts)


def check_transition(job: str, now: JobState, target: JobState) -> None:
    """Raises JobError when a job in state ``now`` cannot move to ``target``."""
    if target not in JOB_TRANSITIONS[now]:
        raise JobError(f"job {job} is {now}; it cannot become {target} ({_hint(now)})")


def _hint(now: JobState) -> str:
    nexts = JOB_TRANSITIONS[now]
    return "it has ended" if not nexts else f"from here it can become {', '.join(nexts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One way to answer a row: a model with its queue, as frozen in the job's spec. Step 0 is the first choice."""

    model: str
    upstream: str
    queue: str
    account: str | None = None
    engine: str | None = None
    price: Price | None = None
    device_nanousd_per_hour: int | None = None
    max_retries: int = 5
    timeout_s: float = 120.0

    @property
    def has_price(self) -> bool:
        return self.price is not None or self.device_nanousd_per_hour is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a worker knows of a job in one round: frozen when the round opens, kept in SQL, versioned."""

    task: TaskKind
    steps: tuple[Step, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    contract: int = CONTRACT_VERSION

    def as_dict(self) -> dict[str, Any]:
        steps = [
            {
                "model": s.model,
                "upstream": s.upstream,
                "queue": s.queue,
                "account": s.account,
                "engine": s.engine,
                "price": None if s.price is None else s.price.as_dict(),
                "device_nanousd_per_hour": s.device_nanousd_per_hour,
                "max_retries": s.max_retries,
                "timeout_s": s.timeout_s,
            }
            for s in self.steps
        ]
        return {
            "contract": self.contract,
            "task": self.task.value,
            "steps": steps,
            "params": dict(self.params),
            "schema": self.schema,
            "stream": self.stream,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Spec:
        steps = tuple(
            Step(**{**s, "price": None if s["price"] is None else Price.from_dict(s["price"])}) for s in data["steps"]
        )
        return cls(
            task=TaskKind(data["task"]),
            steps=steps,
            params=data["params"],
            schema=data["schema"],
            stream=data["stream"],
            contract=data["contract"],
        )


@dataclass(frozen=True, slots=True)
class Rows(Sequence[int]):
    """A set of row numbers in ascending order, held as inclusive ranges and written as ``0-99,105``."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def span(cls, first: int, count: int) -> Rows:
        return cls(((first, first + count - 1),)) if count else cls(())

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Rows:
        ranges: list[tuple[int, int]] = []
        for n in sorted(set(numbers)):
            if ranges and ranges[-1][1] == n - 1:
                ranges[-1] = (ranges[-1][0], n)
            else:
                ranges.append((n, n))
        return cls(tuple(ranges))

    @classmethod
    def parse(cls, text: str) -> Rows:
        ranges = []
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            ranges.append((int(first), int(last or first)))
        return cls(tuple(ranges))

    def __str__(self) -> str:
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges)

    def __len__(self) -> int:
        return sum(b - a + 1 for a, b in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for a, b in self.ranges:
            yield from range(a, b + 1)

    def __contains__(self, n: object) -> bool:
        return isinstance(n, int) and any(a <= n <= b for a, b in self.ranges)

    def __getitem__(self, i: Any) -> Any:
        return list(self)[i]

    @property
    def first(self) -> int:
        return self.ranges[0][0]

    @property
    def last(self) -> int:
        return self.ranges[-1][1]

    def halves(self) -> tuple[Rows, Rows]:
        """Two sets of about equal size; with one row the second is empty."""
        numbers = list(self)
        middle = (len(numbers) + 1) // 2
        return Rows.of(numbers[:middle]), Rows.of(numbers[middle:])
