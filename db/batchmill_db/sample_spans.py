"""Device samples over spans of time: means and sums of each device by each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, case, func, select

from .samples import MEAN_FIGURES, measured
from .schema import device_sample
from .session import now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The samples of one device by one engine within one span of time: means, and sums where the name says so.

    ``number`` counts spans from the oldest, which is 0. ``worker`` and ``model`` are None in lines without an engine.
    ``thermal`` counts samples in which heat slowed the device down.
    """

    host: str
    device: str
    worker: str | None
    model: str | None
    number: int
    samples: int
    last_ms: int
    means: Mapping[str, float] = field(default_factory=dict)
    most_temperature_c: float | None = None
    most_memory_bytes: float | None = None
    bubble_ms: int | None = None
    thermal: int = 0
    throttle: str | None = None


def spans(conn: Connection, *, ago_ms: int, count: int) -> list[Span]:
    """The last ``ago_ms`` in ``count`` spans of equal length, the newest of which ends now. Reads only.

    One pass over the samples of that time, by the index on their time. Spans without a sample are left out.
    """
    c = device_sample.c
    start_ms: int = conn.execute(select(now_ms() - ago_ms)).scalar_one()
    counted = (c.at_ms - start_ms) // max(1, ago_ms // count)
    # A sample of this very moment belongs to the newest span; in one of its own its worker would be counted twice.
    number = case((counted >= count, count - 1), else_=counted).label("number")
    key = (c.host, c.device, c.worker, c.model, number)
    sums = (
        func.count().label("samples"),
        func.max(c.at_ms).label("last_ms"),
        *(func.avg(c[name]).label(name) for name in MEAN_FIGURES),
        func.max(c.temperature_c).label("most_temperature_c"),
        func.max(c.memory_used_bytes).label("most_memory_bytes"),
        func.sum(c.bubble_ms).label("bubble_ms"),
        func.sum(case((c.throttle.like("%thermal%"), 1), else_=0)).label("thermal"),
        func.max(c.throttle).label("throttle"),
    )
    found = conn.execute(select(*key, *sums).where(c.at_ms >= start_ms).group_by(*key).order_by(*key))
    return [_span(r) for r in found]


def _span(r: Any) -> Span:
    return Span(
        host=r.host,
        device=r.device,
        worker=r.worker,
        model=r.model,
        number=int(r.number),
        samples=int(r.samples),
        last_ms=int(r.last_ms),
        means=measured(r, MEAN_FIGURES),
        most_temperature_c=r.most_temperature_c,
        most_memory_bytes=r.most_memory_bytes,
        bubble_ms=None if r.bubble_ms is None else int(r.bubble_ms),
        thermal=int(r.thermal),
        throttle=r.throttle,
    )
