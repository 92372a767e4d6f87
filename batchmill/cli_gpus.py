"""The command `gpus`: what devices do now, or did lately, and what to change."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, load_settings

from .opening import opened
from .options import JsonOption
from .terminal import facts, print_json, say, tell

if TYPE_CHECKING:
    from rich.console import Console

    from batchmill_db.session import Database

# What the command runs is imported by it: all of it together takes a second, which `--help` need not.

_PANEL = "Operating"
_REDRAW_S = 1.0
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def add_commands(app: typer.Typer) -> None:
    """Adds the command of this module."""
    example = "batchmill gpus; batchmill gpus --report --since 1h"
    app.command("gpus", rich_help_panel=_PANEL, epilog=f"Example: {example}")(gpus_command)


def gpus_command(
    once: Annotated[bool, typer.Option("--once", help="Show how they stand, and end.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Averages, alarms and advice over a longer time instead.")] = False,
    since: Annotated[str, typer.Option("--since", metavar="T", help="How far a report looks back, as 30m, 1h or 7d.")] = "1h",
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show how much each device is used, what bounds it, and what to change.

    A table that is redrawn until Ctrl-C; where no terminal is, a line per device and sample. Workers of devices record
    the figures: `batchmill worker gpu`, or those that `batchmill up` and `batchmill run` start.
    """
    settings = load_settings()
    since_s = parse_span(since)
    with opened(settings) as database:
        if report:
            _report(database, settings, since_s, as_json=as_json)
        elif as_json or once:
            _once(database, settings, as_json=as_json)
        else:
            _watch(database, settings)


def parse_span(text: str) -> float:
    """Seconds of a length of time such as ``90s``, ``30m``, ``1h`` or ``7d``. Raises ConfigurationError."""
    found = _SPAN.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not found or seconds <= 0:
        raise ConfigurationError(f"--since {text!r} is no length of time; write for example --since 30m, 1h or 7d")
    return seconds


def _report(database: Database, settings: Settings, since_s: float, *, as_json: bool) -> None:
    from batchmill_ops.gpus_report import read_report
    from batchmill_ops.gpus_report_table import report_parts

    now = datetime.now(UTC)
    reports = database.read(lambda conn: read_report(conn, settings, since_s=since_s, now=now))
    if as_json:
        print_json({"since_s": since_s, "devices": [r.as_dict() for r in reports]})
        return
    for part in report_parts(reports, since_s=since_s):
        tell(part)


def _once(database: Database, settings: Settings, *, as_json: bool) -> None:
    from batchmill_ops.gpus import read_devices
    from batchmill_ops.gpus_diagnosis import Thresholds
    from batchmill_ops.gpus_table import DevicesView

    devices = read_devices(database, settings)
    if as_json:
        print_json([d.as_dict() for d in devices])
    else:
        tell(DevicesView(devices, Thresholds.of(settings)))


def _watch(database: Database, settings: Settings) -> None:
    """Until Ctrl-C, which is how it is meant to end."""
    console = facts()
    try:
        if console.is_terminal:
            _live(database, settings, console)
        else:
            _lines(database, settings)
    except KeyboardInterrupt:
        return


def _live(database: Database, settings: Settings, console: Console) -> None:
    """Redraws in place; a database that is away for a moment is told, and asked again."""
    from rich.live import Live
    from rich.text import Text

    from batchmill_db.session import DatabaseError
    from batchmill_ops.gpus import read_devices
    from batchmill_ops.gpus_diagnosis import Thresholds
    from batchmill_ops.gpus_table import DevicesView

    limits, never = Thresholds.of(settings), threading.Event()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                view = DevicesView(read_devices(database, settings), limits, at=datetime.now())
                live.update(view, refresh=True)
            except DatabaseError as fault:
                live.update(Text(str(fault), "red"), refresh=True)
            never.wait(_REDRAW_S)


def _lines(database: Database, settings: Settings) -> None:
    """A line per device and sample, also until nobody reads them."""
    from batchmill_db.session import DatabaseError
    from batchmill_ops.gpus import read_devices
    from batchmill_ops.gpus_table import NONE_YET, line_of

    never = threading.Event()
    while True:
        try:
            devices = read_devices(database, settings)
        except DatabaseError as fault:
            say(f"batchmill: {fault}")
        else:
            at = datetime.now(UTC).isoformat(timespec="seconds")
            for line in [line_of(d) for d in devices]:
                tell(f"{at} {line}")
            if not devices:
                say(NONE_YET)
        never.wait(settings.sample_every_s)
