"""The samples of one device, of all its engines, as one series of figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from batchmill_db.sample_spans import Span
from batchmill_db.samples import DEVICE_FIGURES, MEAN_FIGURES, SUMMED_FIGURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a device and the engines on it did in one part of a time, as means; None where it is not known.

    ``bubble_share`` and ``thermal_share`` are parts of that time, 0 to 1. ``samples`` is how many of the device's own
    it stands for.
    """

    samples: int = 0
    use_percent: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_cache_percent: float | None = None
    batch_rows: float | None = None
    tokens_per_s: float | None = None
    bubble_share: float | None = None
    thermal_share: float = 0.0
    throttle: str | None = None
    most_memory_bytes: float | None = None
    most_temperature_c: float | None = None

    @property
    def memory_percent(self) -> float | None:
        used, total = self.memory_used_bytes, self.memory_total_bytes
        return None if used is None or not total else 100 * used / total

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: the figures under their names, rounded; unknown is None."""
        return {f.name: _rounded(getattr(self, f.name)) for f in fields(self)} | {
            "memory_percent": _rounded(self.memory_percent)
        }


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def points_of(spans: Iterable[Span], *, count: int, every_ms: float) -> list[Point | None]:
    """One point per part; None where nothing was sampled. ``every_ms`` is the time that one sample stands for."""
    parts: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        parts[span.number].append(span)
    return [_point(parts[n], every_ms) if n in parts else None for n in range(count)]


def _point(spans: Sequence[Span], every_ms: float) -> Point:
    samples = max(s.samples for s in spans)
    return Point(
        samples=samples,
        bubble_share=_bubble(spans, every_ms),
        thermal_share=min(1.0, sum(s.thermal for s in spans) / max(1, samples)),
        throttle=next((s.throttle for s in spans if s.throttle), None),
        most_memory_bytes=max((s.most_memory_bytes for s in spans if s.most_memory_bytes is not None), default=None),
        most_temperature_c=max((s.most_temperature_c for s in spans if s.most_temperature_c is not None), default=None),
        **{name: _mean(spans, name) for name in DEVICE_FIGURES},
        **{name: _of_engines(spans, name) for name in MEAN_FIGURES if name not in DEVICE_FIGURES},
    )


_JOINED = (*MEAN_FIGURES, "bubble_share")


def joined(points: Sequence[Point]) -> Point:
    """Several points as one: means by their samples, maxima of maxima."""
    samples = sum(p.samples for p in points)
    return Point(
        samples=samples,
        thermal_share=sum(p.thermal_share * p.samples for p in points) / max(1, samples),
        throttle=next((p.throttle for p in reversed(points) if p.throttle), None),
        most_memory_bytes=max((p.most_memory_bytes for p in points if p.most_memory_bytes is not None), default=None),
        most_temperature_c=max(
            (p.most_temperature_c for p in points if p.most_temperature_c is not None), default=None
        ),
        **{name: _weighted([(getattr(p, name), p.samples) for p in points]) for name in _JOINED},
    )


def _weighted(values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(v, n) for v, n in values if v is not None]
    total = sum(n for _, n in known)
    return sum(v * n for v, n in known) / total if total else None


def _known(spans: Sequence[Span], name: str) -> list[tuple[float, int]]:
    return [(s.means[name], s.samples) for s in spans if name in s.means]


def _mean(spans: Sequence[Span], name: str) -> float | None:
    """Over lines that hold a figure of the device itself: after a change of who writes it, those of two workers."""
    return _weighted(_known(spans, name))


def _of_engines(spans: Sequence[Span], name: str) -> float | None:
    """Over the engines of the device, each by its mean."""
    known = [value for value, _ in _known(spans, name)]
    if name in SUMMED_FIGURES:
        return sum(known) if known else None
    return max(known, default=None)


def _bubble(spans: Sequence[Span], every_ms: float) -> float | None:
    """Of several engines the least of those that had something to do: while one computes, the device is not idle."""
    shares = [
        (min(1.0, s.bubble_ms / (s.samples * every_ms)), s.means.get("running", 0.0))
        for s in spans
        if s.bubble_ms is not None
    ]
    if not shares:
        return None
    return min((share for share, running in shares if share or running), default=0.0)
