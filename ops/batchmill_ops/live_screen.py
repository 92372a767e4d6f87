"""Live progress of a job on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchmill_core.request import BAD_STATUSES, RowStatus
from batchmill_db.jobs import JobRecord

from .figures import duration, one_line, percent, rate
from .progress import LineScreen, Screen, View, money, rows_done
from .report import JobReport

_STYLES = {RowStatus.OK: "green", **dict.fromkeys(BAD_STATUSES, "red")}
_SHOWN_ERRORS = 3
_SHOWN_WAITS = 3


def screen_for(console: Console) -> Screen:
    """A live screen on a terminal, plain lines elsewhere."""
    return LiveScreen(console) if console.is_terminal else LineScreen(console)


class LiveScreen:
    """Redraws a few lines in place; they are gone when it is closed."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._open = False

    def show(self, view: View) -> None:
        if not self._open:
            self._live.start()
            self._open = True
        self._live.update(frame(view), refresh=True)

    def close(self) -> None:
        if self._open:
            self._live.stop()
            self._open = False


def frame(view: View) -> RenderableType:
    """All lines of one moment."""
    return Group(*_lines(view))


def _lines(view: View) -> Iterator[RenderableType]:
    job = view.report.job
    yield Text.assemble((job.name, "bold"), f" · {job.model} · job ", (job.public_id, "cyan"))
    yield _bar(view)
    yield Text(
        f"{rate(view.pace.rows_per_s)} rows/s · {rate(view.pace.tokens_per_s)} tok/s · "
        f"{view.situation.in_flight:,} in flight · {money(view.report)}",
        overflow="ellipsis",
        no_wrap=True,
    )
    if view.report.by_status:
        yield statuses(view.report)
    for e in view.report.errors[:_SHOWN_ERRORS]:
        yield Text(f"{e.count:,} × {e.kind}: {one_line(e.message, 200)}", "red", overflow="ellipsis", no_wrap=True)
    for reason in view.waits[:_SHOWN_WAITS]:
        yield Text(f"waits: {one_line(reason, 400)}", "yellow")


def _bar(view: View) -> Table:
    job = view.report.job
    left = "" if view.pace.left_s is None or not job.loaded else f"{duration(view.pace.left_s)} left"
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(
        ProgressBar(total=max(1, job.n_rows), completed=job.done),
        Text(f"{_share(job)}{' · ' if left else ''}{left}"),
    )
    return row


def _share(job: JobRecord) -> str:
    return (
        f"{percent(job.done, job.n_rows)} · {job.done:,} of {job.n_rows:,} rows"
        if job.loaded
        else rows_done(job, " rows")
    )


def statuses(report: JobReport) -> Text:
    """``370 ok · 9 truncated · 2 failed``, in colours."""
    parts = [(f"{n:,} {s.value}", _STYLES.get(s, "yellow")) for s, n in report.by_status.items()]
    return Text(" · ").join(Text(text, style) for text, style in parts)
