"""What commands print for people: reports, lists, costs and estimates as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from rich.table import Table
from rich.text import Text

from batchmill_core.usage import Usage, dollars
from batchmill_db.costs import Spending
from batchmill_ops.figures import duration, one_line, rate
from batchmill_ops.live_screen import statuses
from batchmill_ops.progress import money, rows_done
from batchmill_ops.report import JobReport, Situation
from batchmill_producers.estimate import Estimate

_STATE_STYLES = {"done": "green", "open": "cyan", "paused": "yellow", "failed": "red", "cancelled": "red"}


def report_table(report: JobReport, *, waits: Sequence[str] = (), situation: Situation | None = None) -> Table:
    """One job: state, rows by status, tokens, cost, timing, an example of each kind of error, why it waits."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _report_rows(report):
        table.add_row(name, value)
    if situation is not None:
        table.add_row("chunks", _chunks(situation))
    for e in report.errors:
        table.add_row("error", f"{e.count:,} × {e.kind}, as row {e.row}: {one_line(e.message, 300)}")
    for reason in waits:
        table.add_row("waits", Text(reason, "yellow"))
    return table


def _report_rows(report: JobReport) -> Iterator[tuple[str, str | Text]]:
    job = report.job
    yield "job", Text.assemble((job.public_id, "cyan"), f" · {job.name} · {job.model}", f" · {job.task}")
    if job.key is not None:
        yield "key", job.key
    yield "state", Text(job.state.value, _STATE_STYLES.get(job.state.value, ""))
    if job.reason is not None:
        yield "reason", job.reason
    yield "rows", rows_done(job)
    if job.n_skipped:
        first = job.skipped[0] if job.skipped else {}
        example = f", the first on line {first['line']}: {one_line(str(first['reason']))}" if first else ""
        yield "left out", f"{job.n_skipped:,} bad rows{example}"
    if report.by_status:
        yield "statuses", statuses(report)
    if job.round > 1:
        yield "round", str(job.round)
    yield "tokens", _tokens(job.usage)
    yield "cost", money(report) + (f", of it {dollars(job.wasted_nanousd)} wasted" if job.wasted_nanousd else "")
    if report.seconds is not None:
        yield (
            "time",
            f"{duration(report.seconds)} · {rate(report.rows_per_s)} rows/s · {rate(report.tokens_per_s)} tok/s",
        )


def _tokens(usage: Usage) -> str:
    text = f"{usage.input:,} in"
    if usage.cached_input:
        text += f" ({usage.cached_input:,} cached)"
    text += f" · {usage.output:,} out"
    return text + (f" ({usage.reasoning:,} reasoning)" if usage.reasoning else "")


def _chunks(situation: Situation) -> str:
    states = " · ".join(f"{n:,} {state}" for state, n in sorted(situation.chunks.by_state.items()))
    return f"{states or 'none'} · {situation.in_flight:,} calls in flight"


def jobs_table(reports: Iterable[JobReport]) -> Table:
    """Jobs, one a line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "name", "model", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "done", "bad", "cost", "rows/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("created (UTC)", no_wrap=True)
    table.add_column("reason")  # the only one that wraps, so that the others are never cut
    for r in reports:
        job = r.job
        table.add_row(
            Text(job.public_id, "cyan"),
            job.name,
            job.model,
            Text(job.state.value, _STATE_STYLES.get(job.state.value, "")),
            f"{job.n_rows:,}" if job.loaded or job.ended else f"{job.n_rows:,}+",
            f"{job.done:,}",
            f"{r.bad_rows:,}" if r.bad_rows else "",
            dollars(r.cost_nanousd),
            rate(r.rows_per_s),
            _minute(job.created_ms),
            one_line(job.reason or "", 80),
        )
    return table


def _minute(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def costs_table(by: str, spendings: Sequence[Spending], total: Spending) -> Table:
    """Spending by model, job, day, account or worker, with a last line of sums."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_footer=len(spendings) > 1, footer_style="bold")
    table.add_column(by, "all", no_wrap=True)
    figures = [_spent(s) for s in (*spendings, total)]
    for i, name in enumerate(("calls", "tokens in", "tokens out", "cost", "unknown ≤", "wasted")):
        table.add_column(name, figures[-1][i], justify="right", no_wrap=True)
    for s, cells in zip(spendings, figures, strict=False):
        table.add_row(s.key, *cells)
    return table


def _spent(s: Spending) -> tuple[str, ...]:
    unpriced = s.calls > 0 and s.unbounded >= s.calls and not s.settled_nanousd
    return (
        f"{s.calls:,}",
        f"{s.input_tokens:,}",
        f"{s.output_tokens:,}",
        "unknown" if unpriced else dollars(s.settled_nanousd),
        dollars(s.unknown_nanousd) if s.unknown_nanousd else "",
        dollars(s.wasted_nanousd) if s.wasted_nanousd else "",
    )


def estimate_table(e: Estimate) -> Table:
    """What a job would come to, as ranges."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("rows", f"{e.rows:,}" + (f", {e.skipped:,} bad rows left out" if e.skipped else ""))
    table.add_row("tokens in", f"{e.input_tokens[0]:,} to {e.input_tokens[1]:,}")
    table.add_row("tokens out", f"{e.output_tokens[0]:,} to {e.output_tokens[1]:,}")
    cost = e.cost_nanousd
    table.add_row("cost", "unknown" if cost is None else f"{dollars(cost[0])} to {dollars(cost[1])}")
    if e.seconds is not None:
        table.add_row("time", f"{duration(e.seconds[0])} to {duration(e.seconds[1])}")
    for problem in e.problems:
        table.add_row("problem", Text(problem, "yellow"))
    return table
