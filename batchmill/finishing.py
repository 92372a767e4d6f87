"""What a command that waited for a job says at its end: results, the summary, the exit code."""

from __future__ import annotations

import typer

from batchmill_core.errors import ConfigurationError
from batchmill_db.session import Database
from batchmill_ops.report import JobReport

from .output import Output
from .tables import report_table
from .terminal import print_json, say, tell


def finish(database: Database, report: JobReport, to: Output | None, *, as_json: bool) -> None:
    """Writes the results where they were asked for, shows the report, says what comes next.

    Raises typer.Exit with 1 when rows ended badly, ConfigurationError when results cannot be written there.
    """
    job_id = report.job.public_id
    if to is not None:
        count = _written(database, report, to)
        if to.path is not None:
            say(f"{count:,} results written to {to.path}")
    _show(report, as_json=as_json, on_stdout=to is None or to.path is not None)
    if to is None:
        say(f"results: batchmill results {job_id} -o FILE.jsonl")
    if report.bad_rows:
        rows, them = ("row", "it") if report.bad_rows == 1 else ("rows", "them")
        say(f"{report.bad_rows:,} {rows} ended badly; ask {them} again with: batchmill retry {job_id}")
        raise typer.Exit(1)


def _written(database: Database, report: JobReport, to: Output) -> int:
    try:
        return to.write(database, report.job.id)
    except ConfigurationError as fault:  # a full disk, a column that there is not: no reason to ask again
        job = report.job.public_id
        raise ConfigurationError(
            f"{fault}; job {job} is {report.job.state} and its answers are saved: `batchmill results {job} -o FILE` writes them"
        ) from fault


def _show(report: JobReport, *, as_json: bool, on_stdout: bool) -> None:
    if as_json:
        print_json(report.as_dict())
    else:
        tell(report_table(report), aside=not on_stdout)
