"""The report on devices, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .figures import duration, rate
from .gpus_columns import STYLES, spark
from .gpus_diagnosis import span
from .gpus_points import Point, joined
from .gpus_report import Alarm, DeviceReport

_GIB = 1 << 30
_SPARK_WIDTH = 40


def report_parts(reports: Sequence[DeviceReport], *, since_s: float) -> Iterator[RenderableType]:
    """A block per device."""
    if not reports:
        yield Text(f"no device was sampled in the last {duration(since_s)}", "yellow")
    for i, report in enumerate(reports):
        if i:
            yield ""
        yield _block(report, since_s)


def _block(report: DeviceReport, since_s: float) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(report, since_s):
        table.add_row(name, value)
    return table


def _lines(report: DeviceReport, since_s: float) -> Iterator[tuple[str, str | Text]]:
    history, mean = report.history, report.mean
    served = f" · {', '.join(history.models)} by {', '.join(history.workers)}" if history.models else ""
    yield "device", Text.assemble((history.device, "bold cyan"), f" on {history.host}{served}")
    yield (
        "sampled",
        f"{duration(report.sampled_s)} of {duration(since_s)}, with work {100 * report.work_share:.0f} % of it",
    )
    if mean.use_percent is not None:
        yield "use", Text.assemble(f"{mean.use_percent:.0f} %  ", (_use_over_time(history.points), "green"))
    yield from _memory(mean)
    yield from _engine(report)
    yield from _physics(report)
    for alarm in report.alarms:
        yield "alarm", _alarm(alarm)
    for told in report.told:
        verdict = told.finding.verdict
        yield "verdict", Text.assemble((verdict.value, STYLES[verdict]), f": {told.finding.why}")
        if told.advice is not None:
            yield "", Text.assemble(("→ ", "dim"), told.advice)


def _use_over_time(points: Sequence[Point | None]) -> str:
    """The whole time in at most so many bars."""
    each = max(1, -(-len(points) // _SPARK_WIDTH))
    parts = [[p for p in points[i : i + each] if p is not None] for i in range(0, len(points), each)]
    return spark([joined(p).use_percent if p else None for p in parts], most=100.0)


def _memory(mean: Point) -> Iterator[tuple[str, str]]:
    if mean.memory_percent is not None and mean.memory_total_bytes is not None:
        most = (mean.most_memory_bytes or 0) / _GIB
        yield "memory", f"{mean.memory_percent:.0f} %, at most {most:.1f} of {mean.memory_total_bytes / _GIB:.1f} GiB"


def _engine(report: DeviceReport) -> Iterator[tuple[str, str]]:
    mean = report.mean
    if mean.running is not None:
        parts = [f"{mean.running:.0f} running", f"{mean.waiting or 0:.0f} waiting"]
        parts += [f"batches of {mean.batch_rows:.0f}"] if mean.batch_rows is not None else []
        parts += [f"KV cache {mean.kv_cache_percent:.0f} %"] if mean.kv_cache_percent is not None else []
        yield "rows", " · ".join(parts)
    if mean.tokens_per_s is not None:
        yield "tokens", f"{rate(mean.tokens_per_s)} tok/s · {report.tokens or 0:,} in all"
    if mean.bubble_share is not None:
        yield "bubble", f"idle while rows waited {100 * mean.bubble_share:.1f} % of the time"
    if report.history.p99_ms is not None:
        yield "latency", f"p99 {span(report.history.p99_ms)}"


def _physics(report: DeviceReport) -> Iterator[tuple[str, str]]:
    mean = report.mean
    if mean.power_w is not None:
        yield "power", f"{mean.power_w:.0f} W · {report.energy_wh or 0:,.1f} Wh in all"
    if mean.temperature_c is not None:
        yield "heat", f"{mean.temperature_c:.0f} °C, at most {mean.most_temperature_c or 0:.0f} °C"
    if mean.clock_mhz is not None:
        yield "clock", f"{mean.clock_mhz:,.0f} MHz"


def _alarm(alarm: Alarm) -> Text:
    when = f"{alarm.first_at:%H:%M:%S} to {alarm.last_at:%H:%M:%S} UTC"
    if alarm.first_at.date() != alarm.last_at.date():
        when = f"{alarm.first_at:%Y-%m-%d %H:%M} to {alarm.last_at:%Y-%m-%d %H:%M} UTC"
    return Text.assemble(
        (alarm.verdict.value, STYLES[alarm.verdict]),
        f" {100 * alarm.share:.0f} % of the time, {when}; at worst {alarm.why}",
    )
