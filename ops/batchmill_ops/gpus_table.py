"""Devices on a terminal: a line each with sparklines, in as many columns as fit, and under them what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from .figures import rate
from .gpus import DeviceState
from .gpus_columns import STYLES, Column, columns_for, short_host
from .gpus_diagnosis import Thresholds, Verdict

NONE_YET = "no device was sampled in the last minutes; start a worker: `batchmill worker gpu --model M`"


class DevicesView:
    """All devices at one moment, fitted to the width that it is drawn in. ``at``: the time for the title line, if any."""

    def __init__(self, devices: Sequence[DeviceState], limits: Thresholds, *, at: datetime | None = None) -> None:
        self._devices = devices
        self._limits = limits
        self._at = at

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._parts(options.max_width)

    def _parts(self, width: int) -> Iterator[RenderableType]:
        hosts = list(dict.fromkeys(d.history.host for d in self._devices))
        if self._at is not None:
            yield self._title(len(hosts), self._at)
        if not self._devices:
            yield Text(NONE_YET, "yellow")
            return
        columns = columns_for(self._devices, self._limits, width)
        for i, host in enumerate(hosts):
            if i or self._at is not None:
                yield ""
            yield _table([d for d in self._devices if d.history.host == host], columns, host)
        yield from _advice(self._devices)

    def _title(self, hosts: int, at: datetime) -> Text:
        count = len(self._devices)
        text = Text.assemble(("batchmill gpus", "bold"), f" · {count} device{'' if count == 1 else 's'}")
        text.append(f" on {hosts} hosts" if hosts > 1 else "")
        if alarms := sum(d.is_alarm for d in self._devices):
            text.append(f" · {alarms} to look at", "yellow")
        return text.append(f" · {at:%H:%M:%S} · Ctrl-C ends", "dim")


def _table(devices: Sequence[DeviceState], columns: Sequence[Column], host: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        title = Text(short_host(host), "bold cyan") if i == 0 else Text(column.title)
        table.add_column(
            title,
            width=column.width,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for device in devices:
        table.add_row(*(column.cell(device, column.width) for column in columns))
    return table


def _advice(devices: Sequence[DeviceState]) -> Iterator[RenderableType]:
    """Each thing to do once, with all the devices that it is said of."""
    several = len({d.history.host for d in devices}) > 1
    groups: dict[tuple[Verdict, str], list[tuple[str, str]]] = {}
    for d in devices:
        name = f"{d.history.device}@{short_host(d.history.host)}" if several else d.history.device
        for told in d.told:
            if told.advice is not None:
                groups.setdefault((told.finding.verdict, told.advice), []).append((name, told.finding.why))
    if groups:
        yield ""
    order = list(Verdict)
    for (verdict, advice), of in sorted(groups.items(), key=lambda g: order.index(g[0][0])):
        names = ", ".join(name for name, _ in of)
        why = of[0][1] if len(of) == 1 else f"{of[0][1]} ({of[0][0]})"
        yield Text.assemble((f"{names} ", "bold"), (verdict.value, STYLES[verdict]), f": {why}")
        yield _indented(advice)


def _indented(advice: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text(" →", "dim"), Text(advice))
    return table


def line_of(device: DeviceState) -> str:
    """One device as one line of words, for where no terminal redraws a table."""
    history, now = device.history, device.now
    parts = [f"{history.device}@{history.host}", *history.models]
    figures = [
        ("use", now.use_percent, "{:.0f}%"),
        ("memory", now.memory_percent, "{:.0f}%"),
        ("running", now.running, "{:.0f}"),
        ("waiting", now.waiting, "{:.0f}"),
        ("power", now.power_w, "{:.0f}W"),
        ("temperature", now.temperature_c, "{:.0f}C"),
        ("p99", history.p99_ms, "{:.0f}ms"),
    ]
    parts += [f"{name}={form.format(value)}" for name, value, form in figures if value is not None]
    if now.tokens_per_s is not None:
        parts.append(f"tok/s={rate(now.tokens_per_s)}")
    if now.bubble_share is not None:
        parts.append(f"bubble={100 * now.bubble_share:.1f}%")
    return " ".join([*parts, f"· {'; '.join(f'{t.finding.verdict.value}: {t.finding.why}' for t in device.told)}"])
