"""The checks of the jobs in the database: what keeps those that are not done from going on."""

from __future__ import annotations

from collections.abc import Iterator

from batchmill_core.job import JobState
from batchmill_core.settings import Settings
from batchmill_db import jobs, telemetry
from batchmill_db.session import Database

from .doctor_check import Check, ok, stands, warn
from .report import Situation, read_situation
from .up import remedy_here
from .waits import nobody_serves, stopped_because, wait_for_own

_LOOKED_AT = 20  # the newest: a folder may hold thousands
_PAUSED_SHOWN = 5


def check_jobs(database: Database, settings: Settings) -> Iterator[Check]:
    """Open jobs that nobody works on, accounts that are stopped, jobs that were paused for a reason."""
    newest = database.read(lambda conn: jobs.newest(conn, limit=1000))
    is_open = [j for j in newest if j.state in (JobState.OPEN, JobState.LOADING)][:_LOOKED_AT]
    paused = [j for j in newest if j.state is JobState.PAUSED and j.reason][:_PAUSED_SHOWN]
    unserved = list(_unserved([read_situation(database, j.id) for j in is_open], settings))
    yield from unserved or [_workers(database)]
    yield from _stopped_accounts(database)
    for job in paused:
        yield from _stopped(read_situation(database, job.id))


def _workers(database: Database) -> Check:
    live = database.read(telemetry.live_workers)
    return ok("workers", f"{len(live)} live" if live else "none live, and no open job needs one")


def _unserved(situations: list[Situation], settings: Settings) -> Iterator[Check]:
    remedy = remedy_here(settings)
    told: set[str] = set()
    for situation in situations:
        yield from _stopped(situation)
        sentence = nobody_serves(situation, remedy)
        detail, _, advice = (sentence or "").rpartition("; ")
        if not detail or detail in told:
            continue
        told.add(detail)
        waiting = f"{detail}; job {situation.report.job.public_id} waits for it"
        starts_by_itself = remedy is wait_for_own and not situation.unfit
        yield warn("workers", waiting, advice) if starts_by_itself else stands("workers", waiting, _as_command(advice))


def _as_command(advice: str) -> str:
    start, colon, command = advice.partition("start one: ")
    return f"start one: `{command}`" if colon and not start else advice


def _stopped_accounts(database: Database) -> Iterator[Check]:
    for account in database.read(telemetry.accounts).values():
        if account.state == "stopped":
            advice = (
                f"set it right where the line `account {account.name}` below says; it is probed and goes on by itself, "
                "`batchmill resume JOB` tries it at once"
            )
            yield stands(f"account {account.name}", f"stopped: {account.reason}", advice)


def _stopped(situation: Situation) -> Iterator[Check]:
    job = situation.report.job
    sentence = stopped_because(situation)
    if sentence is None:
        return
    detail, _, advice = sentence.partition("; ") if job.reason is None else _around(sentence, job.reason.rstrip(".;"))
    yield warn(f"job {job.public_id}", detail.removeprefix(f"job {job.public_id} "), advice)


def _around(sentence: str, reason: str) -> tuple[str, str, str]:
    """A sentence cut at the semicolon after ``reason``, which may hold some itself."""
    before, found, after = sentence.partition(f"{reason}; ")
    return f"{before}{reason}" if found else before, found, after
