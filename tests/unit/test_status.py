"""`batchmill status`: facts of a folder as JSON and as a table, whatever is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchmill.cli import main
from batchmill_core.settings import Settings
from batchmill_db import telemetry
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.status import read_status
from tests.prepared_jobs import PreparedFolder

WORKER = WorkerRecord(
    id="w1", name="api0-sim@host", host="host", pid=7, wing="api", queues=["api.sim"], slots=8, version="1"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield prepared
    prepared.database.close()


def test_a_folder_in_which_nothing_was_ever_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["status"]) == 0

    said = capsys.readouterr().out
    assert "nothing runs here; `batchmill up` keeps a stack running" in said
    assert not (tmp_path / ".batchmill").exists()


def test_queues_with_work_and_who_serves_them(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.submit()
    folder.database.run(lambda conn: telemetry.register(conn, WORKER))

    assert main(["status", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["queues"] == [{"queue": "api.sim", "ready": 1, "leased": 0, "workers": 1, "slots": 8}]
    assert found["jobs"] == {"open": 1}
    assert found["workers"][0]["name"] == "api0-sim@host"
    assert (found["stack"], found["flower"], found["up_pid"], found["broker"]) == (None, None, None, None)


def test_the_table_names_queues_and_workers(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.submit()
    folder.database.run(lambda conn: telemetry.register(conn, WORKER))

    main(["status"])

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["api.sim", "1", "0", "1", "8"] in lines
    assert ["api0-sim@host", "starting", "api.sim", "8", "0", "7"] in lines


def test_a_broker_and_a_database_that_are_away_are_said(tmp_path: Path) -> None:
    (tmp_path / "batchmill.db").mkdir()  # SQLite cannot open it
    settings = Settings(
        home=tmp_path,
        broker_url="redis://:s3cret-of-redis@127.0.0.1:9/0",
        database_url=f"sqlite:///{tmp_path / 'batchmill.db'}",
    )

    status = read_status(settings)

    assert (status.broker, status.broker_answers) == ("redis://:***@127.0.0.1:9/0", False)
    assert "unable to open database file" in str(status.database_fault)


def test_down_without_up_says_so(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 0

    assert capsys.readouterr().out == "nothing runs here by `batchmill up`\n"
