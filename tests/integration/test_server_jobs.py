"""Jobs on a server of the user's own: whatever is killed in the middle, every row ends and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db.jobs import JobRecord
from tests.integration.harness import Mill, milling, until
from tests.integration.test_server_engine import UNRULY, gone

ROWS = 160
NOBODY = "http://127.0.0.1:9/v1"  # no account is asked here
COMMAND = [sys.executable, "-m", "batchmill_ops.simulator", "--host={host}", "--port={port}", "--latency=100ms"]


@contextmanager
def _milling(
    home: Path, broker_url: str, command: list[str] = COMMAND, upstream: str = "sim-chat", *, lease_s: int = 20
) -> Iterator[Mill]:
    """On SQLite alone: how a server is kept does not depend on the database."""
    table = f"""
[models.own]
engine = "server"
model = "{upstream}"
device_usd_per_hour = 3.6
timeout_s = 30
[models.own.options]
capacity_rows = 4
command = {json.dumps(command)}
"""
    urls = {"broker_url": broker_url, "database_url": f"sqlite:///{home / 'jobs.db'}", "provider": NOBODY}
    with milling(home, **urls, settings={"lease_s": lease_s}, tables=table) as mill:
        yield mill


def _server_of(worker_pid: int) -> psutil.Process | None:
    """The server that runs under a worker's guard."""
    for guard in psutil.Process(worker_pid).children():
        if any("server_guard" in word for word in guard.cmdline()):
            return next(iter(guard.children()), None)
    return None


def _await_rows(mill: Mill, job: JobRecord, rows: int) -> None:
    until(f"{rows} rows are done", lambda: len(mill.saved(job)) >= rows, timeout_s=60)


def _check(mill: Mill, job: JobRecord) -> JobRecord:
    """All rows ended well, the job's data holds together, and its cost is its device time."""
    done = mill.invariants(job)
    lines = mill.calls(job)
    settled = [line for line in lines if line.state == "settled"]
    assert done.by_status[RowStatus.OK] == done.n_rows
    assert all(line.device_ns for line in settled)
    assert all(line.cost_nanousd == round(line.device_ns * 3.6 / 3600) for line in settled)
    return done


def test_rows_of_a_server_that_is_killed_in_the_middle_all_end_well(tmp_path: Path, valkey_url: str) -> None:
    with _milling(tmp_path, valkey_url) as mill:
        worker = mill.start_worker(queues=["gpu.own"], slots=2)
        with mill.leading():
            job = mill.submit(ROWS, model="own", chunk_size=20)
            _await_rows(mill, job, 15)
            killed = until("the server runs", lambda: _server_of(worker.pid))
            os.kill(killed.pid, signal.SIGKILL)
            mill.wait_done(job, timeout_s=90)

        _check(mill, job)
        assert worker.alive
        assert "server_lost" in worker.log
        assert max(c.crash_count for c in mill.chunks(job)) >= 1


def test_a_worker_that_is_killed_takes_its_server_along_and_another_finishes_the_rows(
    tmp_path: Path, valkey_url: str
) -> None:
    with _milling(tmp_path, valkey_url, lease_s=5) as mill:
        first = mill.start_worker(queues=["gpu.own"], slots=2)
        with mill.leading():
            job = mill.submit(ROWS, model="own", chunk_size=20)
            _await_rows(mill, job, 15)
            server = until("the server runs", lambda: _server_of(first.pid))
            first.kill()
            until("its server is gone", lambda: gone(server.pid))
            mill.start_worker(queues=["gpu.own"], slots=2)
            mill.wait_done(job, timeout_s=90)

        _check(mill, job)


def test_a_row_that_kills_its_server_ends_dead_alone(tmp_path: Path, valkey_url: str) -> None:
    rows = [{"n": n, "text": "please die" if n == 5 else "please live"} for n in range(8)]
    with _milling(tmp_path, valkey_url, [sys.executable, str(UNRULY), "{port}", "good", str(tmp_path)], "m-1") as mill:
        worker = mill.start_worker(queues=["gpu.own"], slots=1)
        with mill.leading():
            job = mill.submit(rows, model="own", chunk_size=8)
            mill.wait_state(job, JobState.DONE, timeout_s=120)

        done = mill.invariants(job)
        assert done.by_status[RowStatus.DEAD] == 1
        assert done.by_status[RowStatus.OK] == 7
        assert worker.alive


def test_a_worker_that_drains_ends_its_server_and_another_goes_on(tmp_path: Path, valkey_url: str) -> None:
    with _milling(tmp_path, valkey_url) as mill:
        first = mill.start_worker(queues=["gpu.own"], slots=2)
        with mill.leading():
            job = mill.submit(ROWS, model="own", chunk_size=20)
            _await_rows(mill, job, 15)
            server = until("the server runs", lambda: _server_of(first.pid))
            first.terminate()
            first.wait_dead()
            mill.start_worker(queues=["gpu.own"], slots=2)
            mill.wait_done(job, timeout_s=90)

        _check(mill, job)
        assert gone(server.pid)
        assert {(c.crash_count, c.fail_count) for c in mill.chunks(job)} == {(0, 0)}
