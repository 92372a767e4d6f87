"""Statements about device samples: what devices and the engines on them did, moment by moment, bounded in number.

Each worker writes a line per device and interval. The figures of the device itself stand in the line of one of them
only, however many processes share it; the engine's figures stand in the line of the worker that runs the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select

from . import telemetry
from .schema import device_sample
from .session import now_ms

PRUNE_ROWS = 5000
_SILENCE_MS = 60_000
_MISSED_SAMPLES = 2.5  # a worker that is silent for so many intervals leaves the device to another


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """What a device said about itself; None for a figure that it does not have. ``throttle`` names reasons, with commas."""

    device: str
    use_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: int | None = None
    throttle: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What the engine of one worker did on the device since the sample before.

    ``waiting`` are rows that the worker holds ready and that do not run; ``tokens_per_s`` is this device's equal share
    where an engine spans several; ``bubble_ms`` is how long the device stood idle while rows waited for it.
    """

    worker: str
    model: str
    running: int | None = None
    waiting: int | None = None
    kv_cache_percent: float | None = None
    batch_rows: float | None = None
    tokens_per_s: float | None = None
    bubble_ms: int | None = None


def add(
    conn: Connection,
    host: str,
    reading: DeviceReading,
    engines: Sequence[EngineReading],
    *,
    holder: str,
    every_ms: float,
) -> bool:
    """Adds the sample of one device. Answers whether ``holder`` is the one that writes the device's own figures.

    Of several processes that sample a device one does, by the lead of a name made of host and device; it keeps the
    lead as long as it goes on. Not idempotent: a sample that is sent twice is there twice, and changes no average much.
    """
    ttl_ms = int(every_ms * _MISSED_SAMPLES)
    leads = telemetry.lead(conn, _leader(host, reading.device), holder, ttl_ms=ttl_ms).leads
    own = asdict(reading) if leads else {"device": reading.device}
    lines: list[dict[str, Any]] = [asdict(e) for e in engines] or ([{}] if leads else [])
    for line in lines:
        conn.execute(insert(device_sample).values(at_ms=now_ms(), host=host, **own, **line))
        own = {"device": reading.device}
    return leads


def leave(conn: Connection, host: str, device: str, holder: str) -> None:
    """Lets another process write the device's own figures at once. Idempotent."""
    telemetry.resign(conn, _leader(host, device), holder)


def _leader(host: str, device: str) -> str:
    return f"sampler:{host}:{device}"


def prune(conn: Connection, *, keep_ms: int, most_rows: int) -> int:
    """Deletes samples older than ``keep_ms``, and the oldest of more than ``most_rows``; `PRUNE_ROWS` at most at once.

    Answers how many it deleted. Idempotent.
    """
    ids = select(device_sample.c.id)
    newest = select(func.max(device_sample.c.id)).scalar_subquery()
    old = ids.where(device_sample.c.at_ms < now_ms() - keep_ms).order_by(device_sample.c.at_ms).limit(PRUNE_ROWS)
    surplus = ids.where(device_sample.c.id <= newest - most_rows).order_by(device_sample.c.id).limit(PRUNE_ROWS)
    return sum(
        conn.execute(delete(device_sample).where(device_sample.c.id.in_(found.scalar_subquery()))).rowcount
        for found in (old, surplus)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest sample of one device; only the figures that were measured, those of its engines taken together."""

    host: str
    device: str
    figures: Mapping[str, float]


DEVICE_FIGURES = tuple(one.name for one in fields(DeviceReading) if one.name not in {"device", "throttle"})
ENGINE_FIGURES = tuple(one.name for one in fields(EngineReading) if one.name not in {"worker", "model"})
MEAN_FIGURES = tuple(name for name in (*DEVICE_FIGURES, *ENGINE_FIGURES) if name != "bubble_ms")  # bubbles are summed
SUMMED_FIGURES = (
    "running",
    "waiting",
    "tokens_per_s",
)  # over the engines of a device; of the others the largest counts


def newest(conn: Connection, *, within_ms: int = _SILENCE_MS) -> list[Newest]:
    """The newest sample of each device that was sampled within ``within_ms``. Reads only."""
    fresh = select(device_sample).where(device_sample.c.at_ms > now_ms() - within_ms)
    of_device: dict[tuple[str, str], dict[str, float]] = {}
    of_engine: dict[tuple[str, str, str | None, str | None], Mapping[str, float]] = {}
    for r in conn.execute(fresh.order_by(device_sample.c.at_ms, device_sample.c.id)):
        figures = of_device.setdefault((r.host, r.device), {})
        if own := measured(r, DEVICE_FIGURES):
            figures.clear()
            figures.update(own)
        of_engine[(r.host, r.device, r.worker, r.model)] = measured(r, ENGINE_FIGURES)
    for (host, device, *_), done in of_engine.items():
        _join(of_device[(host, device)], done)
    return [Newest(host=host, device=device, figures=f) for (host, device), f in sorted(of_device.items())]


def measured(row: Any, names: Sequence[str]) -> dict[str, float]:
    """The figures of a line that are there."""
    return {name: float(value) for name in names if (value := getattr(row, name)) is not None}


def _join(into: dict[str, float], figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        before = into.get(name, 0.0)
        into[name] = before + value if name in SUMMED_FIGURES else max(before, value)
