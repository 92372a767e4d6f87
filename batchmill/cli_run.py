"""The commands that take a data set: `run`, `submit`, `estimate`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from batchmill_core.errors import ConfigurationError
from batchmill_core.job import JobState
from batchmill_core.settings import Settings, load_settings
from batchmill_db.jobs import JobRecord
from batchmill_ops.report import read_situation
from batchmill_ops.up import remedy_here
from batchmill_ops.waits import nobody_serves, stopped_because
from batchmill_producers.estimate import estimate
from batchmill_producers.export import check_columns
from batchmill_producers.submit import Prepared, Submission, prepare, submit

from .control import resume
from .finishing import finish
from .help_examples import examples
from .opening import doorbell, opened
from .options import DATA_PANEL, ExcelSafeOption, GiveUpOption, JsonOption, takes_submission
from .output import Format, Output, output_of
from .running import attached, interruptible_loading, see_through, shown_meanwhile
from .tables import estimate_table
from .terminal import print_json, say, tell
from .time_spans import patience_of

if TYPE_CHECKING:
    from batchmill_ops.stack import Stack


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this module, in the order that help lists them."""

    for name in ("run", "submit", "estimate"):
        command = takes_submission(globals()[f"{name}_command"])
        app.command(name, rich_help_panel=DATA_PANEL, epilog=examples(name))(command)


def run_command(
    submission: Submission,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="OUT", help="Write the results here when done; - is standard output.")] = None,
    format: Annotated[Format | None, typer.Option("--format", help="Of the results; by default by the suffix of OUT.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", metavar="C,…", help="Of the results: result and input columns.")] = None,
    excel_safe: ExcelSafeOption = False,
    give_up_after: GiveUpOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Run a data set through a model: submit, show progress, write results.

    With no broker configured it starts what it needs here and stops it afterwards; else it waits for workers as long as
    it takes. Ctrl-C pauses the job and says how to go on. Exit code 1: some rows ended badly; 3: the job is stopped.
    """
    to = _run_output(output, format, columns, excel_safe=excel_safe, as_json=as_json)
    patience_s = patience_of(give_up_after)
    settings = load_settings()
    prepared = _prepared(submission, settings)
    if to is not None:
        check_columns(to.format, to.columns, prepared.source.columns)
    with attached(settings) as stack:
        record = _submitted(stack, settings, submission, prepared)
        report = see_through(stack, settings, record.id, record.public_id, patience_s=patience_s)
        finish(stack.database, report, to, as_json=as_json)


def _run_output(
    path: str | None, format: Format | None, columns: str | None, *, excel_safe: bool, as_json: bool
) -> Output | None:
    if path is None and (format or columns or excel_safe):
        raise ConfigurationError("--format and --columns are for results; add -o OUT (or -o - for standard output)")
    if path == "-" and as_json:
        raise ConfigurationError("--json and -o - would both write to standard output; keep one of them")
    return None if path is None else output_of(path, format, columns, excel_safe=excel_safe)


def _prepared(submission: Submission, settings: Settings) -> Prepared:
    """What shows with the first row is said before anything is started, so that a mistake leaves nothing behind."""
    with interruptible_loading(submission.key):
        return prepare(submission, settings)


def _submitted(stack: Stack, settings: Settings, submission: Submission, prepared: Prepared) -> JobRecord:
    """The job, open: a paused one of the same key goes on. An eager one runs and is shown while its data set is read."""
    with (
        doorbell(settings, stack.broker_url) as ring,
        interruptible_loading(submission.key) as loading,
        shown_meanwhile(stack, settings) as show,
    ):

        def begun(record: JobRecord) -> None:
            loading.opened = record
            if not record.loaded:
                loading.be_quiet()
                _go_on(stack, submission, record)
                show(record.id)

        record = submit(
            stack.database,
            settings,
            submission,
            ring=ring,
            progress=loading,
            note=say,
            opened=begun,
            prepared=prepared,
        )
    if loading.opened is None or loading.opened.loaded:
        _go_on(stack, submission, record)
    _say_skipped(record)
    return record


def _go_on(stack: Stack, submission: Submission, record: JobRecord) -> None:
    if record.state is JobState.PAUSED:
        resume(stack.database, record.id, budget_nanousd=submission.budget_nanousd)
        say(f"job {record.public_id} of key {record.key} was paused; it goes on")
    elif record.state is JobState.OPEN:
        rows = f"{record.n_rows:,} rows" if record.loaded else f"reading goes on; key {record.key}"
        say(f"job {record.public_id} · {record.name} · {rows} · {record.model}")


def _say_skipped(record: JobRecord) -> None:
    if record.n_skipped:
        first = record.skipped[0]
        say(f"{record.n_skipped:,} bad rows are left out, the first on line {first['line']}: {first['reason']}")


def submit_command(submission: Submission) -> None:
    """Submit a data set without waiting; the job's id alone goes to standard output.

    Workers that are running take it up. With no broker configured nothing runs by itself: `batchmill up` keeps workers
    running for all jobs, `batchmill resume JOB` does the work of one.
    """
    settings = load_settings()
    prepared = _prepared(submission, settings)
    with opened(settings, make=True) as database:
        with contextlib.ExitStack() as open_things:
            ring = None if settings.embedded else open_things.enter_context(doorbell(settings))
            loading = open_things.enter_context(interruptible_loading(submission.key))

            def begun(record: JobRecord) -> None:
                loading.opened = record
                tell(record.public_id)
                sys.stdout.flush()  # of an eager job it is wanted before the data set is read

            record = submit(
                database, settings, submission, ring=ring, progress=loading, note=say, opened=begun, prepared=prepared
            )
        _say_skipped(record)
        situation = read_situation(database, record.id)
    unserved = nobody_serves(situation, remedy_here(settings))
    if record.state is JobState.OPEN and unserved is not None:
        say(f"saved {record.n_rows:,} rows; {unserved}")
    elif loading.opened is None and record.state is not JobState.OPEN:
        say(f"job {record.public_id} of key {record.key} is there already; it is {record.state}")
    elif (stopped := stopped_because(situation)) is not None:
        say(f"saved {record.n_rows:,} rows; {stopped}")
    if loading.opened is None:
        tell(record.public_id)


def estimate_command(submission: Submission, as_json: JsonOption = False) -> None:
    """Render and check every row with no call, and say what the job would come to.

    Tokens, cost and time are ranges; nothing is sent or saved.
    """
    found = estimate(load_settings(), replace(submission, key=None))
    if as_json:
        print_json(found.as_dict())
    else:
        tell(estimate_table(found))
