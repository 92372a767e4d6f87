"""The columns of the table of devices: what each shows, how wide it is, and which give way on a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from .figures import rate
from .gpus import LIVE_POINTS, DeviceState
from .gpus_diagnosis import Thresholds, Verdict
from .gpus_points import Point

STYLES: Mapping[Verdict, str] = {
    Verdict.SILENT: "bold red",
    Verdict.THROTTLED: "bold red",
    Verdict.STARVED: "bold yellow",
    Verdict.MEMORY_BOUND: "bold yellow",
    Verdict.LATENCY: "yellow",
    Verdict.ROOM: "cyan",
    Verdict.COMPUTE_BOUND: "green",
    Verdict.STEADY: "green",
    Verdict.OUT_OF_WORK: "dim",
    Verdict.GONE: "dim",
    Verdict.UNKNOWN: "magenta",
}
_BARS = "▁▂▃▄▅▆▇█"
_GIB = 1 << 30
_TOLD_BUBBLE = 0.02
_LEAST_SPARK = 8
_MOST_NAME = 10
_MOST_MODEL = 18
_NEEDED = 8  # columns below this are there whether a device has the figure or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of so many cells' width. Those with the highest ``need`` go first when the terminal is narrow.

    ``cell`` draws a device into a width. A column that ``grows`` takes what width is left, up to that.
    """

    title: str
    width: int
    need: int
    cell: Callable[[DeviceState, int], Text]
    right: bool = True
    grows: int = 0


def columns_for(devices: Sequence[DeviceState], limits: Thresholds, width: int) -> list[Column]:
    """The columns that fit side by side with a space between, of those for which some device has a figure."""
    wanted = [
        c
        for c in _columns(devices, limits)
        if c.need < _NEEDED or any(c.cell(d, c.width).plain.strip(" –") for d in devices)
    ]
    chosen: list[Column] = []
    for column in sorted(wanted, key=lambda c: c.need):
        if _taken(chosen) + column.width > width:
            break
        chosen.append(column)
    left = width - _taken(chosen) + 1
    fitted = []
    for column in (c for c in wanted if c in chosen):
        more = max(0, min(left, column.grows - column.width))
        left -= more
        fitted.append(replace(column, width=column.width + more))
    return fitted


def short_host(host: str) -> str:
    """A host's name without its domain."""
    return host.partition(".")[0]


def _taken(columns: Sequence[Column]) -> int:
    return sum(c.width + 1 for c in columns)


def _columns(devices: Sequence[DeviceState], limits: Thresholds) -> list[Column]:
    name = min(_MOST_NAME, max(len(name) for d in devices for name in (d.history.device, short_host(d.history.host))))
    model = min(_MOST_MODEL, max(*(len(_model(d)) for d in devices), 5))
    verdict = max(len(d.finding.verdict.value) for d in devices)
    top = max((p.tokens_per_s or 0.0 for d in devices for p in d.history.points if p), default=0.0)
    use = _spark_of(lambda p: p.use_percent, "green", most=100.0)
    tokens = _spark_of(lambda p: p.tokens_per_s, "cyan", most=top)
    return [
        Column(title="", width=name, need=0, cell=lambda d, _: Text(d.history.device, "bold"), right=False),
        Column(title="model", width=model, need=4, cell=lambda d, _: Text(_model(d)), right=False),
        Column(title="use", width=4, need=1, cell=lambda d, _: _use(d.now.use_percent, limits)),
        Column(title="", width=_LEAST_SPARK, need=3, cell=use, right=False, grows=LIVE_POINTS),
        Column(title="mem", width=4, need=2, cell=lambda d, _: _memory(d.now.memory_percent, limits)),
        Column(title="GiB", width=9, need=8, cell=lambda d, _: Text(_gib(d.now), "dim")),
        Column(title="tok/s", width=6, need=5, cell=lambda d, _: Text(rate(d.now.tokens_per_s))),
        Column(title="", width=_LEAST_SPARK, need=9, cell=tokens, right=False, grows=LIVE_POINTS),
        Column(title="rows", width=7, need=6, cell=lambda d, _: _rows(d.now)),
        Column(title="bubble", width=6, need=7, cell=lambda d, _: _bubble(d.now.bubble_share)),
        Column(title="KV", width=4, need=13, cell=lambda d, _: Text(_percent(d.now.kv_cache_percent))),
        Column(title="W", width=4, need=10, cell=lambda d, _: Text(_whole(d.now.power_w))),
        Column(title="°C", width=3, need=10, cell=lambda d, _: _temperature(d.now)),
        Column(title="MHz", width=5, need=14, cell=lambda d, _: Text(_whole(d.now.clock_mhz), "dim")),
        Column(title="p99", width=7, need=11, cell=lambda d, _: _p99(d.history.p99_ms, limits)),
        Column(
            title="",
            width=verdict,
            need=1,
            cell=lambda d, _: Text(d.finding.verdict.value, STYLES[d.finding.verdict]),
            right=False,
        ),
    ]


def spark(values: Sequence[float | None], *, most: float) -> str:
    """A bar per value, full at ``most``; a space where there is none."""
    return "".join(" " if v is None else _bar(v / most if most else 0.0) for v in values)


def _bar(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]


def _spark_of(
    figure: Callable[[Point], float | None], style: str, *, most: float
) -> Callable[[DeviceState, int], Text]:
    """The newest points that fit, the newest at the right."""

    def cell(device: DeviceState, width: int) -> Text:
        newest = device.history.points[-width:]
        return Text(spark([None if p is None else figure(p) for p in newest], most=most).rjust(width), style)

    return cell


def _model(device: DeviceState) -> str:
    return ", ".join(device.history.models) or "–"


def _use(percent: float | None, limits: Thresholds) -> Text:
    if percent is None:
        return Text("–")
    busy, starved = percent >= limits.use_percent, percent < limits.starved_percent
    return Text(_percent(percent), "green" if busy else "yellow" if starved else "")


def _memory(percent: float | None, limits: Thresholds) -> Text:
    return Text(_percent(percent), "yellow" if percent is not None and percent > limits.memory_high_percent else "")


def _temperature(point: Point) -> Text:
    return Text(_whole(point.temperature_c), "bold red" if point.thermal_share else "")


def _gib(point: Point) -> str:
    if point.memory_used_bytes is None or not point.memory_total_bytes:
        return "–"
    return f"{_short(point.memory_used_bytes / _GIB)}/{_short(point.memory_total_bytes / _GIB)}"


def _short(gib: float) -> str:
    return f"{gib:.0f}" if gib >= 9.95 else f"{gib:.1f}"


def _rows(point: Point) -> Text:
    """``64+12``: running and waiting."""
    if point.running is None:
        return Text("–")
    waiting = round(point.waiting or 0)
    return Text.assemble(f"{round(point.running):,}", (f"+{waiting:,}" if waiting else "", "yellow"))


def _bubble(share: float | None) -> Text:
    if share is None:
        return Text("–")
    return Text(
        f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%", "yellow" if share > _TOLD_BUBBLE else ""
    )


def _p99(milliseconds: float | None, limits: Thresholds) -> Text:
    if milliseconds is None:
        return Text("–")
    text = f"{milliseconds:.0f} ms" if milliseconds < 9999.5 else f"{milliseconds / 1000:.0f} s"
    return Text(text, "yellow" if milliseconds > limits.p99_ms else "")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}%"


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
