"""With a configured broker, workers are somebody else's: `run` and `Job.wait` say that none is there, and wait for one."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchmill
from batchmill.cli import main
from batchmill.running import patience_without
from batchmill_core.errors import JobStopped
from batchmill_core.request import RowStatus
from batchmill_core.settings import load_settings
from batchmill_db import jobs
from tests.integration.harness import until
from tests.prepared_jobs import PreparedFolder

RUN = ["run", "data.jsonl", "-m", "sim-chat", "-p", "Label: {{ text }}"]
UNSERVED = "no live worker serves queue api.sim; start one: batchmill worker api --accounts sim"


@pytest.fixture
def folder(tmp_path: Path, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    monkeypatch.setenv("BATCHMILL_BROKER_URL", valkey_url)
    monkeypatch.chdir(tmp_path)
    yield prepared
    prepared.database.close()


def answered(folder: PreparedFolder) -> bool:
    """Whether all rows are; the first chunk was rung for when it was saved, and may be again after a second."""
    with folder.database.reading() as conn:
        (job,) = jobs.newest(conn)
    folder.answer(job, [RowStatus.OK] * 4)
    return folder.read(job).done == 4


def test_only_workers_that_are_ours_are_given_up(folder: PreparedFolder) -> None:
    assert patience_without(load_settings(folder.path)) == math.inf
    assert patience_without(load_settings(folder.path, {})) < math.inf


def test_run_says_that_no_worker_is_there_and_waits_for_one(folder: PreparedFolder) -> None:
    command = [sys.executable, "-m", "batchmill.cli", *RUN]
    env = {**os.environ, "COLUMNS": "200"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if UNSERVED in line:
                break
        until("its rows are answered as a worker would", lambda: answered(folder))

        assert process.wait(60) == 0
    assert UNSERVED in said


@pytest.mark.parametrize("command", [RUN, ["resume", "reviews", "--wait"]])
def test_giving_up_ends_with_3_and_leaves_the_job_to_workers(
    command: list[str], folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.submit()

    assert main([*command, "--give-up-after", "0s"]) == 3

    assert capsys.readouterr().err.splitlines()[-1] == f"batchmill: {UNSERVED}"
    with folder.database.reading() as conn:
        assert {job.state.value for job in jobs.newest(conn)} == {"open"}


def test_a_length_of_time_that_is_none_is_refused_before_anything_is_saved(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--give-up-after", "soon"]) == 2

    assert "--give-up-after 'soon' is not a length of time" in capsys.readouterr().err
    with folder.database.reading() as conn:
        assert jobs.newest(conn) == []


def test_wait_in_python_says_it_too_and_gives_up_only_when_told(
    folder: PreparedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    client = batchmill.connect(folder=folder.path)
    job = client.job(folder.submit().public_id)

    with pytest.raises(TimeoutError):
        job.wait(timeout=0.5)
    with pytest.raises(JobStopped, match="no live worker"):
        job.wait(give_up_after=0)
    client.close()

    assert [r.getMessage() for r in caplog.records] == [f"job {job.id} waits: {UNSERVED}"] * 2
