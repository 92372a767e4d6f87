"""What all devices did lately: their samples put together, judged, with advice. The facts behind ``batchmill gpus``."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchmill_core.settings import Settings
from batchmill_db import doorbells, latencies, sample_spans, telemetry
from batchmill_db.sample_spans import Span
from batchmill_db.session import Connection, Database
from batchmill_db.telemetry import WorkerRecord

from .gpus_advice import Place, advice
from .gpus_diagnosis import Finding, Seen, Thresholds, diagnose
from .gpus_points import Point, points_of

LIVE_POINTS = 24
SAMPLES_PER_POINT = 3
_SILENT_SAMPLES = 4
_QUEUE = "gpu."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHistory:
    """One device over a time: what it did in each of its equal parts, oldest first; None where there is no sample."""

    host: str
    device: str
    workers: Sequence[str]
    models: Sequence[str]
    points: Sequence[Point | None]
    last_ms: int
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One finding about a device with what to do about it."""

    finding: Finding
    advice: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """One device as it stands: its history, its figures now, and what is to be said."""

    history: DeviceHistory
    now: Point
    told: Sequence[Told]

    @property
    def finding(self) -> Finding:
        """The weightiest."""
        return self.told[0].finding

    @property
    def is_alarm(self) -> bool:
        return any(t.finding.is_alarm for t in self.told)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``. Shares are 0 to 1."""
        found = [
            {"verdict": t.finding.verdict.value, "why": t.finding.why, "advice": t.advice, "alarm": t.finding.is_alarm}
            for t in self.told
        ]
        return {**identity(self.history), **self.now.as_dict(), "p99_ms": self.history.p99_ms, "findings": found}


def identity(history: DeviceHistory) -> dict[str, Any]:
    """Which device it is, under the ``--json`` keys."""
    return {"host": history.host, "device": history.device, "workers": history.workers, "models": history.models}


def read_histories(conn: Connection, settings: Settings, *, ago_s: float, count: int) -> list[DeviceHistory]:
    """Every device that was sampled within ``ago_s``, which is cut into ``count`` parts. Reads only."""
    ago_ms = int(ago_s * 1000)
    by_device: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in sample_spans.spans(conn, ago_ms=ago_ms, count=count):
        by_device[(span.host, span.device)].append(span)
    slow = latencies.recent(conn, ago_ms=ago_ms)
    return [
        _history(host, device, spans, slow, count=count, every_ms=settings.sample_every_s * 1000)
        for (host, device), spans in sorted(by_device.items(), key=lambda x: (x[0][0], _natural(x[0][1])))
    ]


def _history(
    host: str,
    device: str,
    spans: Sequence[Span],
    slow: Mapping[tuple[str, str], Sequence[int]],
    *,
    count: int,
    every_ms: float,
) -> DeviceHistory:
    engines = sorted({(s.worker, s.model) for s in spans if s.worker is not None and s.model is not None})
    return DeviceHistory(
        host=host,
        device=device,
        workers=list(dict.fromkeys(worker for worker, _ in engines)),
        models=list(dict.fromkeys(model for _, model in engines)),
        points=points_of(spans, count=count, every_ms=every_ms),
        last_ms=max(s.last_ms for s in spans),
        p99_ms=percentile([ms for e in engines for ms in slow.get(e, ())], 99),
    )


def _natural(device: str) -> tuple[float, str]:
    try:
        return float(device), device
    except ValueError:
        return math.inf, device


def percentile(values: Iterable[int], percent: float) -> float | None:
    """The least value that so many percent do not exceed (nearest rank); None of nothing."""
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]) if ordered else None


def read_devices(database: Database, settings: Settings) -> list[DeviceState]:
    """Every device that was sampled within the last minutes, as it stands now. Raises DatabaseError."""
    point_s = settings.sample_every_s * SAMPLES_PER_POINT
    with database.reading() as conn:
        histories = read_histories(conn, settings, ago_s=point_s * LIVE_POINTS, count=LIVE_POINTS)
        workers = telemetry.live_workers(conn)
        ready = _ready_models(conn, {m for h in histories for m in h.models})
        elsewhere = _unserved_models(conn, workers)
    now_ms = time.time() * 1000
    limits = Thresholds.of(settings)
    names = {w.name for w in workers}
    return [
        _state(h, settings, limits, ready=ready, elsewhere=elsewhere, workers=names, now_ms=now_ms) for h in histories
    ]


def _ready_models(conn: Connection, models: Iterable[str]) -> set[str]:
    """Models of which a chunk is ready, due, and not taken."""
    return {m for m in models if doorbells.overdue(conn, [f"{_QUEUE}{m}"], waited_ms=0, limit=1)}


def _unserved_models(conn: Connection, workers: Iterable[WorkerRecord]) -> list[str]:
    served = {q for w in workers for q in w.queues}
    work = doorbells.queues_with_work(conn)
    return sorted(q.removeprefix(_QUEUE) for q in work if q.startswith(_QUEUE) and q not in served)


def _state(
    history: DeviceHistory,
    settings: Settings,
    limits: Thresholds,
    *,
    ready: set[str],
    elsewhere: Sequence[str],
    workers: set[str],
    now_ms: float,
) -> DeviceState:
    now = history.points[-1] or Point()
    silent_s = max(0.0, now_ms - history.last_ms) / 1000
    seen = replace(
        seen_in(now, p99_ms=history.p99_ms),
        ready=not ready.isdisjoint(history.models),
        silent_s=silent_s if silent_s > _SILENT_SAMPLES * settings.sample_every_s else None,
        has_worker=not workers.isdisjoint(history.workers),
    )
    place = place_of(history, settings, elsewhere=elsewhere)
    told = [Told(finding=f, advice=advice(f.verdict, place)) for f in diagnose(seen, limits)]
    return DeviceState(history=history, now=now, told=told)


def seen_in(point: Point, *, p99_ms: float | None = None, ready: bool = False, silent_s: float | None = None) -> Seen:
    """A point as the diagnosis wants it."""
    return Seen(
        use_percent=point.use_percent,
        memory_percent=point.memory_percent,
        running=point.running,
        waiting=point.waiting,
        bubble_share=point.bubble_share,
        p99_ms=p99_ms,
        throttle=point.throttle,
        thermal=point.thermal_share >= 0.5,
    )


def place_of(history: DeviceHistory, settings: Settings, *, elsewhere: Sequence[str] = ()) -> Place:
    """What the advice about a device has to know of it."""
    model = history.models[0] if history.models else None
    entry = settings.catalog.models.get(model) if model is not None else None
    return Place(
        host=history.host,
        device=history.device,
        model=model,
        engine=None if entry is None else entry.engine,
        gpu_slots=settings.gpu_slots,
        elsewhere=elsewhere,
    )
