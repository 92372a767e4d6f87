"""What a container's health check says about the workers in it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchmill_core.settings import Settings
from batchmill_db import migrate, telemetry
from batchmill_db.session import Database
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.healthy import faults, is_worker, look_at_flower, look_at_workers, main
from tests.servers import free_port

PATIENCE_MS = 10_000


def worker(pid: int, age_ms: int, name: str = "api0@box") -> WorkerRecord:
    return WorkerRecord(
        id=f"{pid}-{age_ms}",
        name=name,
        host="box",
        pid=pid,
        wing="api",
        queues=("api.sim",),
        slots=8,
        version="1",
        age_ms=age_ms,
    )


def test_a_worker_that_beats_is_healthy() -> None:
    assert faults([worker(7, 900)], {7}, patience_ms=PATIENCE_MS) == []


def test_a_process_that_runs_without_a_beat_is_not() -> None:
    assert faults([worker(7, 11_000)], {7}, patience_ms=PATIENCE_MS) == ["api0@box gave no beat for 11 s"]


def test_a_dead_process_is_history_once_another_beats() -> None:
    assert faults([worker(7, 60_000), worker(9, 500)], {9}, patience_ms=PATIENCE_MS) == []


def test_the_last_of_those_that_had_a_process_id_counts() -> None:
    """After a container was started again, its worker has the same process id as before."""
    assert faults([worker(7, 60_000), worker(7, 500)], {7}, patience_ms=PATIENCE_MS) == []


def test_no_process_at_all_is_no_health() -> None:
    assert faults([worker(7, 500)], set(), patience_ms=PATIENCE_MS) == ["no worker process runs here"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a worker, from outside."""
    command = [sys.executable, "-c", "print(flush=True); input()", "-A", "batchmill_workers.tasks"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        started.stdout.readline()  # its command line is to be seen once it runs
        yield started
        started.kill()


def test_this_hosts_workers_are_looked_up(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    settings = Settings(home=tmp_path, database_url=f"sqlite:///{tmp_path / 'mill.db'}")
    database = Database(settings.database_address)
    migrate.upgrade(database)
    mine = replace(worker(process.pid, 0), host=socket.gethostname())
    database.run(lambda conn: telemetry.register(conn, mine))
    database.close()

    assert look_at_workers(settings) == []


def test_neither_another_process_nor_a_thread_with_a_workers_number_is_one(process: subprocess.Popen[bytes]) -> None:
    """Numbers are small in a container, and come again when it is started again."""
    threads = [int(folder.name) for folder in Path(f"/proc/{os.getpid()}/task").iterdir()]

    assert is_worker(process.pid)
    assert not any(is_worker(number) for number in threads)


def test_a_database_that_is_away_is_not_the_workers_fault(capsys: pytest.CaptureFixture[str]) -> None:
    away = Settings(database_url=f"postgresql+psycopg://nobody@127.0.0.1:{free_port()}/none")

    assert look_at_workers(away) == []
    assert capsys.readouterr().out.startswith("cannot tell: ")


def test_flower_that_does_not_answer_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmill_ops.healthy._FLOWER", f"http://127.0.0.1:{free_port()}/healthcheck")

    assert look_at_flower(Settings(flower_password="a-password")) == ["Flower does not answer (ConnectionError)"]


def test_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["broker"]) == 2
    assert "worker|flower" in capsys.readouterr().err


def test_settings_that_are_wrong_are_no_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "batchmill.toml").write_text("slotz = 3\n")
    monkeypatch.setenv("BATCHMILL_HOME", str(tmp_path))

    assert main(["worker"]) == 1
    assert "slotz" in capsys.readouterr().out
