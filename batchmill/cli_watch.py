"""The command that looks at a job until it ends: `watch`."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from batchmill_core.errors import JobError
from batchmill_core.job import JobState
from batchmill_core.settings import load_settings
from batchmill_db import jobs
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Database
from batchmill_ops.live_screen import screen_for
from batchmill_ops.progress import Follower
from batchmill_ops.up import remedy_here

from .completing import job_references
from .finishing import finish
from .help_examples import examples
from .opening import opened
from .options import DATA_PANEL, GiveUpOption, JsonOption
from .terminal import say, talk
from .time_spans import patience_of


def add_commands(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command("watch", rich_help_panel=DATA_PANEL, epilog=examples("watch"))(watch_command)


def watch_command(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Its id, its key, or its name; by default the newest job that is open.", autocompletion=job_references)] = None,
    give_up_after: GiveUpOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Watch a job until it ends: rows, rates, cost, time left, errors, and why it waits.

    While no worker serves it, it says so and waits for one. Ctrl-C ends the watching, not the job. Exit code 1: some
    rows ended badly; 3: the job is stopped.
    """
    patience_s = patience_of(give_up_after)
    settings = load_settings()
    with opened(settings) as database:
        record = _watched(database, job)
        if record.state is JobState.FAILED:
            raise JobError(f"job {record.public_id} could not be loaded: {record.reason}")
        follower = Follower(
            database=database,
            job_id=record.id,
            screen=screen_for(talk()),
            remedy=remedy_here(settings),
            patience_s=math.inf if patience_s is None else patience_s,
        )
        try:
            report = follower.wait()
        except KeyboardInterrupt:
            say(f"job {record.public_id} goes on; watch it again with: batchmill watch {record.public_id}")
            raise typer.Exit(0) from None
        finish(database, report, None, as_json=as_json)


def _watched(database: Database, reference: str | None) -> JobRecord:
    """The job that is meant: without a reference the newest that is not done, else whatever happened to the newest."""
    if reference is not None:
        return database.read(lambda conn: jobs.find(conn, reference))
    newest = database.read(jobs.newest)
    at_work = [j for j in newest if j.state in (JobState.OPEN, JobState.LOADING)]
    if not at_work:
        last = (
            f"the newest is {newest[0].state}: `batchmill show {newest[0].public_id}`"
            if newest
            else "`batchmill submit` makes one"
        )
        raise JobError(f"no job is open; {last}")
    if len(at_work) > 1:
        say(f"the newest of {len(at_work)} open jobs; `batchmill jobs` lists them")
    return at_work[0]
