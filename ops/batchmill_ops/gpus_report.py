"""What devices did over a longer time: means, alarms with when they rang, advice. The facts behind ``gpus --report``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from batchmill_core.settings import Settings
from batchmill_db.session import Connection

from .gpus import DeviceHistory, Told, identity, place_of, read_histories, seen_in
from .gpus_advice import advice
from .gpus_diagnosis import Finding, Thresholds, Verdict, diagnose
from .gpus_points import Point, joined

MOST_PARTS = 1000
_TOLD_SHARE = 0.05  # of the time: what an alarm that rang less is not worth advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One kind of alarm: in what share (0 to 1) of the time with samples it rang, from when to when, and its worst."""

    verdict: Verdict
    share: float
    first_at: datetime
    last_at: datetime
    why: str

    @property
    def finding(self) -> Finding:
        return Finding(verdict=self.verdict, why=self.why)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device over the whole time.

    ``mean`` is of the time in which it had work, which is ``work_share`` (0 to 1) of the ``sampled_s`` seconds that
    samples cover; tokens and energy are of all of that. ``told`` is the verdict on the mean, and what else is worth
    advice.
    """

    history: DeviceHistory
    sampled_s: float
    work_share: float
    mean: Point
    tokens: int | None
    energy_wh: float | None
    alarms: Sequence[Alarm]
    told: Sequence[Told]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **identity(self.history),
            "sampled_s": round(self.sampled_s, 1),
            "work_share": round(self.work_share, 4),
            **self.mean.as_dict(),
            "p99_ms": self.history.p99_ms,
            "tokens": self.tokens,
            "energy_wh": None if self.energy_wh is None else round(self.energy_wh, 3),
            "alarms": [
                {
                    "verdict": a.verdict.value,
                    "share": round(a.share, 4),
                    "first_at": a.first_at.isoformat(timespec="seconds"),
                    "last_at": a.last_at.isoformat(timespec="seconds"),
                    "why": a.why,
                }
                for a in self.alarms
            ],
            "advice": [
                {"verdict": t.finding.verdict.value, "why": t.finding.why, "advice": t.advice} for t in self.told
            ],
        }


def read_report(conn: Connection, settings: Settings, *, since_s: float, now: datetime) -> list[DeviceReport]:
    """A report of every device that was sampled within the last ``since_s``. ``now`` is in UTC. Reads only."""
    count = max(1, min(MOST_PARTS, int(since_s / (2 * settings.sample_every_s))))
    histories = read_histories(conn, settings, ago_s=since_s, count=count)
    return [report_of(h, settings, part_s=since_s / count, now=now) for h in histories]


def report_of(history: DeviceHistory, settings: Settings, *, part_s: float, now: datetime) -> DeviceReport:
    """Judges one device over its points, each of which stands for ``part_s`` up to ``now``."""
    limits = Thresholds.of(settings)
    known = [p for p in history.points if p is not None]
    working = [p for p in known if diagnose(seen_in(p), limits)[-1].verdict is not Verdict.OUT_OF_WORK]
    whole, mean = joined(known), joined(working or known)
    sampled_s = whole.samples * settings.sample_every_s
    alarms = list(_alarms(history, limits, part_s=part_s, now=now))
    return DeviceReport(
        history=history,
        sampled_s=sampled_s,
        work_share=sum(p.samples for p in working) / max(1, whole.samples),
        mean=mean,
        tokens=None if whole.tokens_per_s is None else round(whole.tokens_per_s * sampled_s),
        energy_wh=None if whole.power_w is None else whole.power_w * sampled_s / 3600,
        alarms=alarms,
        told=_told(history, mean, alarms, settings, limits),
    )


def _alarms(history: DeviceHistory, limits: Thresholds, *, part_s: float, now: datetime) -> Iterator[Alarm]:
    """Alarms by kind, the weightiest first. Latency is known for the whole time only."""
    rang: dict[Verdict, list[tuple[int, Point, str]]] = {}
    known = [(n, p) for n, p in enumerate(history.points) if p is not None]
    for number, point in known:
        for finding in diagnose(seen_in(point), limits):
            if finding.is_alarm:
                rang.setdefault(finding.verdict, []).append((number, point, finding.why))
    for verdict in sorted(rang, key=list(Verdict).index):
        times = rang[verdict]
        yield Alarm(
            verdict=verdict,
            share=len(times) / len(known),
            first_at=_begin(history, times[0][0], part_s=part_s, now=now),
            last_at=_begin(history, times[-1][0] + 1, part_s=part_s, now=now),
            why=min(times, key=lambda t: t[1].use_percent or 0.0)[2],
        )


def _begin(history: DeviceHistory, number: int, *, part_s: float, now: datetime) -> datetime:
    ago_s = (len(history.points) - number) * part_s
    return datetime.fromtimestamp(now.timestamp() - ago_s, UTC)


def _told(
    history: DeviceHistory, mean: Point, alarms: Sequence[Alarm], settings: Settings, limits: Thresholds
) -> list[Told]:
    place = place_of(history, settings)
    found = list(diagnose(seen_in(mean, p99_ms=history.p99_ms), limits))
    said = {f.verdict for f in found}
    told = [Told(finding=f, advice=advice(f.verdict, place)) for f in found]
    for alarm in alarms:
        if alarm.verdict not in said and alarm.share >= _TOLD_SHARE:
            told.append(Told(finding=alarm.finding, advice=advice(alarm.verdict, place)))
    return told
