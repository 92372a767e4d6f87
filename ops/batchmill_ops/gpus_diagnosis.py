"""What bounds a device, judged from its figures. Pure: no clock, no database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from batchmill_core.settings import Settings

from .figures import duration

_SOME_ROW = 0.5  # of means: more than this, a row was there more often than not
_SOME_BUBBLE = 0.02  # of the time
_HARDLY_USED_PERCENT = 5.0


class Verdict(StrEnum):
    """What is to be said of a device, the weightiest first."""

    SILENT = "no samples"
    THROTTLED = "thermal throttling"
    STARVED = "starved"
    MEMORY_BOUND = "memory-bound"
    LATENCY = "latency over target"
    ROOM = "room for more"
    COMPUTE_BOUND = "compute-bound"
    STEADY = "steady"
    OUT_OF_WORK = "out of work"
    GONE = "no worker"
    UNKNOWN = "use unknown"


# What somebody should look at; the others are as they should be, or idle.
ALARMS = frozenset({Verdict.SILENT, Verdict.THROTTLED, Verdict.STARVED, Verdict.MEMORY_BOUND, Verdict.LATENCY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where one verdict ends and the next begins; see ``Settings`` for each."""

    use_percent: float = 80.0
    starved_percent: float = 30.0
    memory_low_percent: float = 70.0
    memory_high_percent: float = 90.0
    p99_ms: float = 500.0

    @classmethod
    def of(cls, settings: Settings) -> Thresholds:
        return cls(
            use_percent=settings.gpu_use_percent,
            starved_percent=settings.gpu_starved_percent,
            memory_low_percent=settings.gpu_memory_low_percent,
            memory_high_percent=settings.gpu_memory_high_percent,
            p99_ms=settings.gpu_p99_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a device did over some seconds, as means; None where it is not known.

    ``running`` and ``waiting`` are rows in the engine and rows held ready for it, ``bubble_share`` the part of the time
    (0 to 1) in which the device stood idle while rows waited, ``ready`` whether SQL has a chunk for it that is due.
    """

    use_percent: float | None = None
    memory_percent: float | None = None
    running: float | None = None
    waiting: float | None = None
    bubble_share: float | None = None
    p99_ms: float | None = None
    throttle: str | None = None
    thermal: bool = False
    ready: bool = False
    silent_s: float | None = None  # for how long no sample came, when that is too long
    has_worker: bool = True  # whether a worker that samples it lives

    @property
    def rows_wait(self) -> bool:
        return self.ready or (self.waiting or 0) >= _SOME_ROW or (self.bubble_share or 0) > _SOME_BUBBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict with the figures that led to it."""

    verdict: Verdict
    why: str

    @property
    def is_alarm(self) -> bool:
        return self.verdict in ALARMS


def diagnose(seen: Seen, limits: Thresholds) -> tuple[Finding, ...]:
    """What is to be said of a device: the first is the verdict, the others come with it. Never empty."""
    if seen.silent_s is not None and not seen.has_worker:
        return (Finding(verdict=Verdict.GONE, why=f"its worker ended {duration(seen.silent_s)} ago"),)
    if seen.silent_s is not None:
        return (Finding(verdict=Verdict.SILENT, why=f"its worker lives, but sent none for {duration(seen.silent_s)}"),)
    return tuple(_findings(seen, limits))


def _findings(seen: Seen, limits: Thresholds) -> Iterator[Finding]:
    if seen.thermal:
        yield Finding(verdict=Verdict.THROTTLED, why=f"heat slows it down ({seen.throttle or 'thermal'})")
    state, late = _state(seen, limits), _late(seen, limits)
    if late is not None and state.verdict in (Verdict.STEADY, Verdict.ROOM):  # more rows at once would be later still
        yield late
        return
    if not (seen.thermal and state.verdict is Verdict.COMPUTE_BOUND):  # it could do more if it were cooler
        yield state
    if late is not None and state.verdict is not Verdict.OUT_OF_WORK:
        yield late


def _state(seen: Seen, limits: Thresholds) -> Finding:
    """The one of the states that exclude each other."""
    use, memory = seen.use_percent, seen.memory_percent
    if _is_out_of_work(seen):
        return Finding(verdict=Verdict.OUT_OF_WORK, why="no row waits for it")
    if use is None:
        return Finding(verdict=Verdict.UNKNOWN, why="the device does not tell how much it is used")
    if use < limits.starved_percent and seen.rows_wait:
        return Finding(verdict=Verdict.STARVED, why=f"{_used(use)} while {_what_waits(seen)}")
    if use >= limits.use_percent:
        return Finding(verdict=Verdict.COMPUTE_BOUND, why=f"{_used(use)}: it computes as fast as it can")
    if memory is not None and memory > limits.memory_high_percent:
        return Finding(verdict=Verdict.MEMORY_BOUND, why=f"{_used(use)} with its memory {memory:.0f} % full")
    if memory is not None and memory < limits.memory_low_percent:
        return Finding(verdict=Verdict.ROOM, why=f"{_used(use)} with its memory {memory:.0f} % full")
    return Finding(verdict=Verdict.STEADY, why=_used(use))


def _is_out_of_work(seen: Seen) -> bool:
    if seen.running is None:  # no engine that tells: a device that is not used has no work
        return not seen.rows_wait and seen.use_percent is not None and seen.use_percent < _HARDLY_USED_PERCENT
    return seen.running < _SOME_ROW and not seen.rows_wait


def _late(seen: Seen, limits: Thresholds) -> Finding | None:
    if seen.p99_ms is None or seen.p99_ms <= limits.p99_ms:
        return None
    return Finding(verdict=Verdict.LATENCY, why=f"p99 is {span(seen.p99_ms)}, the target {span(limits.p99_ms)}")


def span(milliseconds: float) -> str:
    """``412 ms``, ``34 s``, ``1 min 50 s``."""
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else duration(milliseconds / 1000)


def _used(use_percent: float) -> str:
    return f"used {use_percent:.0f} %"


def _what_waits(seen: Seen) -> str:
    if (seen.waiting or 0) >= _SOME_ROW:
        return f"{max(1, round(seen.waiting or 0)):,} rows wait"
    if seen.ready:
        return "chunks are ready for it"
    return f"rows waited {100 * (seen.bubble_share or 0):.0f} % of the time"
