"""A job whose loader was killed, and no worker is there to notice: each command says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from batchmill.cli import main
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import loading, steering
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import job as job_table
from batchmill_db.schema import leader
from tests.prepared_jobs import PreparedFolder

KEY = "half-read"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    yield prepared
    prepared.database.close()


def half_read(folder: PreparedFolder, *, state: JobState) -> JobRecord:
    """A job of four rows read so far, as a loader leaves it that was killed without a word."""
    job = folder.submit()
    with folder.database.transaction() as conn:
        conn.execute(update(job_table).values(loaded=False, key=KEY, state=state))
        loading.beat(conn, job.id, "a loader that is gone")
        conn.execute(update(leader).values(until_ms=1))
    return folder.read(job)


def sentence(job: JobRecord) -> str:
    return (
        f"job {job.public_id} stands: nobody reads its data set any more; run the command that began it again with "
        f"--key {KEY}"
    )


@pytest.mark.parametrize("state", [JobState.OPEN, JobState.LOADING])
@pytest.mark.parametrize(("command", "code"), [("status", 0), ("watch", 3), (f"show {KEY}", 0), (f"watch {KEY}", 3)])
def test_it_is_said_with_what_to_do(
    command: str, code: int, state: JobState, folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = half_read(folder, state=state)

    assert main(command.split()) == code

    said = capsys.readouterr()
    assert sentence(job) in said.out + said.err


@pytest.mark.parametrize("state", [JobState.OPEN, JobState.LOADING])
def test_doctor_says_it_too(state: JobState, folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    job = half_read(folder, state=state)

    main(["doctor"])

    said = capsys.readouterr().out
    assert f"warn job {job.public_id}: stands: nobody reads its data set any more" in said
    assert f"→ run the command that began it again with --key {KEY}" in said


def test_pausing_it_names_the_way_that_works(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    job = half_read(folder, state=JobState.OPEN)

    assert main(["pause", KEY]) == 0

    said = capsys.readouterr().err
    assert f"job {job.public_id} is paused: paused by the user; run the command that began it again with" in said
    assert f"--key {KEY}: it goes on after row 4" in said
    assert "batchmill resume" not in said
    assert main(["resume", KEY]) == 2
    assert f"with --key {KEY}: it goes on from there" in capsys.readouterr().err


def test_an_export_of_it_says_that_it_is_not_all(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    job = half_read(folder, state=JobState.OPEN)
    folder.answer(job, [RowStatus.OK] * 4)

    assert main(["results", KEY, "-o", "o.jsonl"]) == 0

    assert capsys.readouterr().err.splitlines() == [
        "4 results written to o.jsonl",
        f"job {job.public_id} has results for 4 of 4 rows so far; it is open, and its data set is not read to its end",
    ]


def test_one_that_is_read_on_is_nothing_to_worry_about(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = half_read(folder, state=JobState.OPEN)
    folder.database.run(lambda conn: loading.beat(conn, job.id, "a loader that lives"))

    main(["status"])

    assert "nobody reads" not in capsys.readouterr().out


def test_status_says_of_five_jobs_why_they_are_stopped(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(6):
        job = folder.submit(name=f"job {n}")
        folder.database.run(
            lambda conn, i=job.id: steering.pause(conn, i, kind="budget", reason="budget of $1 is used up")
        )

    main(["status"])

    assert capsys.readouterr().out.count("is paused: budget of $1 is used up; raise it and go on") == 5
