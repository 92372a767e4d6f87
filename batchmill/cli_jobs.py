"""The commands about jobs that there are: `jobs show results costs pause resume cancel retry rm`."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import typer

from batchmill_core.job import JobState
from batchmill_core.settings import Settings, load_settings
from batchmill_core.usage import usd
from batchmill_db import costs, jobs
from batchmill_db.costs import Spending
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Connection, Database
from batchmill_ops.report import list_reports, read_report, read_situation
from batchmill_ops.up import remedy_here
from batchmill_ops.waits import stopped_because, why_waiting
from batchmill_producers.retry import retry

from . import control
from .asked import parse_budget, statuses_of
from .completing import columns, model_names, statuses
from .finishing import finish
from .help_examples import examples
from .opening import opened
from .options import BudgetOption, ExcelSafeOption, GiveUpOption, JobArgument, JsonOption, ParamOption, parse_params
from .output import Format, output_of
from .running import attached, see_through
from .tables import costs_table, jobs_table, report_table
from .terminal import print_json, say, tell
from .time_spans import patience_of

_LOOK, _STEER = "Looking", "Steering"
_SHOWN_JOBS = 30
By = Literal["model", "job", "day", "account", "worker"]
WaitOption = Annotated[bool, typer.Option("--wait", help="Show progress until it is done; always so with no broker configured.")]  # fmt: skip
StatusOption = Annotated[
    str | None,
    typer.Option(
        "--status", metavar="S,…", help="Only rows of these statuses, such as failed,invalid.", autocompletion=statuses
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this module, in the order that help lists them."""

    for names, panel in (
        (("jobs", "show", "results", "costs"), _LOOK),
        (("pause", "resume", "cancel", "retry", "rm"), _STEER),
    ):
        for name in names:
            app.command(name, rich_help_panel=panel, epilog=examples(name))(globals()[f"{name}_command"])


def jobs_command(as_json: JsonOption = False) -> None:
    """List the jobs, newest first."""
    settings = load_settings()
    if settings.database_url is None and not (settings.state_folder / "batchmill.db").exists():
        reports = []
    else:
        with opened(settings) as database:
            reports = list_reports(database)
    if as_json:
        print_json([r.as_dict() for r in reports])
    elif reports:
        tell(jobs_table(reports[:_SHOWN_JOBS]))
        if len(reports) > _SHOWN_JOBS:
            say(f"{len(reports) - _SHOWN_JOBS:,} older ones are not shown; --json lists them")
    else:
        say(f"there are no jobs in {settings.home} yet; `batchmill run` makes the first")


def show_command(job: JobArgument, as_json: JsonOption = False) -> None:
    """Show one job: its rows by status, errors by kind with an example each, cost, timing, and why rows wait."""
    settings = load_settings()
    with opened(settings) as database:
        situation = read_situation(database, _find(database, job).id)
    if as_json:
        print_json(situation.report.as_dict())
        return
    remedy = remedy_here(settings)
    waits = why_waiting(situation, remedy=remedy, now_ms=int(time.time() * 1000))
    tell(report_table(situation.report, waits=waits, situation=None if situation.report.job.ended else situation))
    if (stopped := stopped_because(situation)) is not None:
        say(stopped)


def results_command(
    job: JobArgument,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file; by default to standard output.")] = None,
    format: Annotated[Format | None, typer.Option("--format", help="By default by the suffix of FILE, else jsonl.")] = None,
    status: StatusOption = None,
    columns: Annotated[str | None, typer.Option("--columns", metavar="C,…", help="Result columns and columns of the input.", autocompletion=columns)] = None,
    excel_safe: ExcelSafeOption = False,
) -> None:  # fmt: skip
    """Export results in row order; rows that have none yet are left out. Streams, so that any size fits."""
    to = output_of(output, format, columns, excel_safe=excel_safe)
    chosen = statuses_of(status)
    with opened(load_settings()) as database:
        record = _find(database, job)
        count = to.write(database, record.id, statuses=chosen)
    if to.path is not None:
        say(f"{count:,} results written to {to.path}")
    if chosen is None and not record.ended:
        some = f"has results for {count:,} of {record.n_rows:,} rows so far" if count else "has no results yet"
        unread = "" if record.loaded else ", and its data set is not read to its end"
        say(f"job {record.public_id} {some}; it is {record.state}{unread}")


def costs_command(
    by: Annotated[By, typer.Option("--by", help="How to group.")] = "model",
    as_json: JsonOption = False,
) -> None:
    """Show what was spent, by the ledger: every call that was sent counts, also of jobs that were removed."""
    with opened(load_settings()) as database:
        spendings = database.run(lambda conn: costs.spending(conn, by=by))
        total = database.run(costs.spending)
    if as_json:
        print_json([_spent(by, s) for s in spendings])
    elif spendings:
        tell(costs_table(by, spendings, total[0] if total else Spending()))
    else:
        say("no call was made yet")


def _spent(by: str, s: Spending) -> dict[str, Any]:
    unpriced = s.calls > 0 and s.unbounded >= s.calls and not s.settled_nanousd
    return {
        by: s.key,
        "calls": s.calls,
        "input_tokens": s.input_tokens,
        "cached_input_tokens": s.cached_input_tokens,
        "output_tokens": s.output_tokens,
        "cost_usd": None if unpriced else usd(s.settled_nanousd),
        "unknown_usd": usd(s.unknown_nanousd) if s.unknown_nanousd else None,
        "wasted_usd": usd(s.wasted_nanousd),
        "reserved_usd": usd(s.reserved_nanousd),
        "unknown_calls": s.unknown_calls,
    }


def pause_command(job: JobArgument) -> None:
    """Pause a job: no more calls are sent, those in flight finish and are saved."""
    with opened(load_settings()) as database:
        record = _find(database, job)
        paused = control.pause(database, record.id)
        situation = read_situation(database, record.id)
    words = "is paused" if paused else "was paused already"
    how = f"job {record.public_id} {words}; go on with: batchmill resume {record.public_id}"
    say(how if situation.is_read else stopped_because(situation) or how)


def resume_command(
    job: JobArgument,
    wait: WaitOption = False,
    budget: BudgetOption = None,
    give_up_after: GiveUpOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with a job that is paused, was interrupted, or was only submitted.

    With no broker configured it starts workers here and shows progress until the job is done. An account that was
    stopped is tried again.
    """
    budget_nanousd = None if budget is None else parse_budget(budget)
    patience_s = patience_of(give_up_after)
    settings = load_settings()
    with opened(settings) as database:
        record = _find(database, job)
        if record.state is JobState.DONE:
            say(f"job {record.public_id} is done already")
            finish(database, read_report(database, record.id), None, as_json=as_json)
            return
        control.resume(database, record.id, budget_nanousd=budget_nanousd)
    _go_on(settings, record, wait=wait, as_json=as_json, patience_s=patience_s)


def _go_on(settings: Settings, record: JobRecord, *, wait: bool, as_json: bool, patience_s: float | None) -> None:
    """Sees a job through where its workers are embedded or that was asked for; else only says that it goes on."""
    if not (wait or settings.embedded):
        if as_json:
            with opened(settings) as database:
                print_json(read_report(database, record.id).as_dict())
        say(f"job {record.public_id} goes on; watch it with: batchmill watch {record.public_id}")
        return
    with attached(settings) as stack:
        report = see_through(stack, settings, record.id, record.public_id, patience_s=patience_s)
        finish(stack.database, report, None, as_json=as_json)


def cancel_command(job: JobArgument) -> None:
    """End a job; rows that have no answer yet are cancelled, answers that are saved stay."""
    with opened(load_settings()) as database:
        record = _find(database, job)
        before = control.cancel(database, record.id)
    say(f"job {record.public_id} {'was cancelled already' if before is JobState.CANCELLED else 'is cancelled'}")


def retry_command(
    job: JobArgument,
    status: StatusOption = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="M", help="Ask another model.", autocompletion=model_names)
    ] = None,
    param: ParamOption = None,
    wait: WaitOption = False,
    give_up_after: GiveUpOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask rows again, by default those that ended failed, invalid, too_long or dead.

    This is the job's next round; an old result stays until it is replaced. Works on with it as `resume` does.
    """
    chosen, params, patience_s = statuses_of(status), parse_params(param or ()), patience_of(give_up_after)
    settings = load_settings()
    with opened(settings) as database:
        record = _find(database, job)
        count = retry(database, settings, record.id, statuses=chosen, model=model, params=params)
    if count == 0:
        say(f"job {record.public_id} has no row of status {status or 'failed, invalid, too_long or dead'}")
        return
    say(f"{count:,} rows of job {record.public_id} are asked again")
    _go_on(settings, record, wait=wait, as_json=as_json, patience_s=patience_s)


def rm_command(job: JobArgument) -> None:
    """Remove a job that has ended, with its rows and results; the ledger keeps what it cost."""
    with opened(load_settings()) as database:
        record = _find(database, job)
        database.run(lambda conn: jobs.remove(conn, record.id))
    say(f"job {record.public_id} is removed")


def _find(database: Database, reference: str) -> JobRecord:
    def find(conn: Connection) -> JobRecord:
        return jobs.find(conn, reference)

    return database.run(find)
