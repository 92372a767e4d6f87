"""A job that is worked on while its data set is still being read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from batchmill_core.errors import JobError, JobStopped
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import jobs, steering
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import result
from batchmill_ops.simulator import SimulatorConfig
from batchmill_ops.simulator.process import simulated
from batchmill_producers.export import write_results
from batchmill_producers.retry import retry
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, until

ROWS = 120
HALF = 60
CHUNK = 20
FAST = SimulatorConfig(latency_s=0.02)
KEY = "eager-key"
BUDGET_NANOUSD = 400_000  # room for some of the first half


class PipeBrokeError(Exception):
    """What a source raises when whatever it reads from is gone."""


def answered(mill: Mill) -> int:
    with mill.database.reading() as conn:
        return int(conn.execute(select(func.count()).select_from(result)).scalar_one())


def rows(count: int = ROWS) -> list[dict[str, Any]]:
    return [{"n": n, "text": f"a great product, number {n}"} for n in range(count)]


def breaking(mill: Mill) -> Iterator[dict[str, Any]]:
    """Half of the rows; then, when some of them are answered, the source is gone."""
    yield from rows()[:HALF]
    until("some rows are answered", lambda: answered(mill) > 0)
    raise PipeBrokeError("the pipe broke")


def by_key(mill: Mill) -> JobRecord:
    with mill.database.reading() as conn:
        found = jobs.by_key(conn, KEY)
    assert found is not None
    return found


def exported(mill: Mill, job: JobRecord) -> list[dict[str, Any]]:
    out = io.BytesIO()
    write_results(mill.database, job.id, out, format="jsonl")
    return [json.loads(line) for line in out.getvalue().splitlines()]


def eagerly(mill: Mill, data: Any) -> JobRecord:
    return mill.submit(data, chunk_size=CHUNK, key=KEY, eager=True)


def test_rows_are_answered_before_the_data_set_is_read_to_its_end(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()
    seen: dict[str, Any] = {}

    def slowly() -> Iterator[dict[str, Any]]:
        yield from rows()[:HALF]
        until("the first half is answered", lambda: answered(mill) == HALF)
        seen["state"], seen["loaded"] = by_key(mill).state, by_key(mill).loaded
        yield from rows()[HALF:]

    job = eagerly(mill, slowly())
    done = mill.wait_done(job)

    assert seen == {"state": JobState.OPEN, "loaded": False}
    assert (done.n_rows, done.by_status["ok"]) == (ROWS, ROWS)
    assert len(mill.bill()) == ROWS
    mill.invariants(job)


def test_a_source_that_fails_pauses_its_job_and_the_same_key_goes_on_from_there(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()
    with pytest.raises((PipeBrokeError, JobStopped), match="the pipe broke"):
        eagerly(mill, breaking(mill))
    paused = by_key(mill)
    kept = answered(mill)
    job = eagerly(mill, rows())
    done = mill.wait_done(job)

    assert (paused.state, paused.reason_kind, paused.loaded) == (JobState.PAUSED, "source", False)
    assert paused.reason is not None
    assert "the pipe broke" in paused.reason
    assert kept > 0
    assert job.id == paused.id
    assert (done.n_rows, done.by_status["ok"]) == (ROWS, ROWS)
    assert len(mill.bill()) == ROWS
    mill.invariants(job)


def test_a_source_that_fails_again_before_anything_new_is_read_pauses_its_job_again(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()
    for _ in range(2):
        with pytest.raises((PipeBrokeError, JobStopped), match="the pipe broke"):
            eagerly(mill, breaking(mill))
    paused = by_key(mill)
    mill.wait_done(eagerly(mill, rows()))

    assert (paused.state, paused.reason_kind) == (JobState.PAUSED, "source")
    assert len(mill.bill()) == ROWS


def test_a_budget_that_is_used_up_while_rows_still_come_pauses_the_job_and_the_rest_is_read(
    make_mill: MakeMill,
) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()

    def slowly() -> Iterator[dict[str, Any]]:
        yield from rows()[:HALF]
        until("the budget is used up", lambda: by_key(mill).state is JobState.PAUSED)
        yield from rows()[HALF:]

    job = mill.submit(slowly(), chunk_size=CHUNK, key=KEY, eager=True, budget_nanousd=BUDGET_NANOUSD)
    kept, spent = answered(mill), mill.job(job.id).held_nanousd
    mill.database.run(lambda conn: steering.resume(conn, job.id, budget_nanousd=100 * BUDGET_NANOUSD))
    done = mill.wait_done(job)

    assert (job.state, job.reason_kind, job.loaded, job.n_rows) == (JobState.PAUSED, "budget", True, ROWS)
    assert 0 < kept < HALF
    assert spent <= BUDGET_NANOUSD
    assert (done.by_status["ok"], len(mill.bill())) == (ROWS, ROWS)
    mill.invariants(job)


def test_a_job_that_is_cancelled_while_rows_still_come_keeps_what_was_answered(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()

    def slowly() -> Iterator[dict[str, Any]]:
        yield from rows()[:HALF]
        until("the first half is answered", lambda: answered(mill) == HALF)
        mill.database.run(lambda conn: steering.cancel(conn, by_key(mill).id))
        yield from rows()[HALF:]

    with pytest.raises(JobError, match="was cancelled while its data set was being read"):
        eagerly(mill, slowly())

    job = by_key(mill)
    assert (job.state, job.n_rows) == (JobState.CANCELLED, HALF)
    assert [line["status"] for line in exported(mill, job)] == ["ok"] * HALF
    mill.invariants(job)


def test_an_export_while_rows_still_come_holds_what_is_answered_and_later_all(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()
    early: list[dict[str, Any]] = []

    def slowly() -> Iterator[dict[str, Any]]:
        yield from rows()[:HALF]
        until("the first half is answered", lambda: answered(mill) == HALF)
        early.extend(exported(mill, by_key(mill)))
        yield from rows()[HALF:]

    job = mill.wait_done(eagerly(mill, slowly()))
    late = exported(mill, job)

    assert [line["row"] for line in early] == list(range(HALF))
    assert late[:HALF] == early
    assert [line["input"]["n"] for line in late] == list(range(ROWS))


def test_rows_that_failed_while_others_still_came_are_asked_again_by_retry(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()

    def slowly() -> Iterator[dict[str, Any]]:
        yield from rows()[:HALF]
        until("the first half is answered", lambda: answered(mill) == HALF)
        yield from rows()[HALF:]

    job = mill.wait_done(eagerly(mill, slowly()))
    asked = retry(mill.database, mill.settings, job.id, statuses=[RowStatus.OK])
    done = mill.wait_done(job)

    assert asked == done.by_status["ok"] == ROWS
    assert len(mill.bill()) == 2 * ROWS
    mill.invariants(job)


LOADER = """
import sys, time
from pathlib import Path
from batchmill_core.settings import load_settings
from batchmill_db.session import Database
from batchmill_producers.submit import Submission, submit

def rows():
    for n in range(int(sys.argv[2])):
        yield {"n": n, "text": f"a great product, number {n}"}
    time.sleep(3600)

settings = load_settings(Path(sys.argv[1]))
wanted = Submission(dataset=rows(), model="sim-chat", prompt="Row {{ n }}: {{ text }}", params={"max_tokens": 20},
                    chunk_size=int(sys.argv[3]), key=sys.argv[4], eager=True)
submit(Database(settings.database_address), settings, wanted)
"""


def test_a_loader_that_is_killed_leaves_a_job_that_is_never_done_and_the_same_key_goes_on(make_mill: MakeMill) -> None:
    mill = make_mill(provider=FAST)
    mill.start_worker()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    command = [sys.executable, "-c", LOADER, str(mill.home), str(HALF), str(CHUNK), KEY]
    with subprocess.Popen(command, env=clean) as loader:
        until("what it has read is answered", lambda: answered(mill) == HALF)
        loader.send_signal(signal.SIGKILL)
    half = mill.job(by_key(mill).id)
    job = eagerly(mill, rows())
    done = mill.wait_done(job)

    assert (half.state, half.loaded, half.n_rows) == (JobState.OPEN, False, HALF)
    assert job.id == half.id
    assert (done.n_rows, done.by_status["ok"]) == (ROWS, ROWS)
    assert len(mill.bill()) == ROWS
    mill.invariants(job)


TOML = """
drain_s = 2.0
[accounts.sim]
base_url = "{base_url}"
[models.sim-chat]
account = "sim"
price = {{ input = 0.40, output = 1.60 }}
"""


def lines(first: int, last: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in range(first, last))


def running(home: Path, *options: str) -> subprocess.Popen[bytes]:
    """``batchmill run -`` in a folder of its own, where it starts all it needs, fed by a pipe."""
    command = [sys.executable, "-m", "batchmill.cli", "run", "-", "-m", "sim-chat", "-p", "row {{ n }}", "--eager"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *options], cwd=home, env=clean, stdin=pipe, stdout=pipe, stderr=pipe)


def answered_in(home: Path) -> int:
    """Rows that are answered, of all jobs of a folder that may not be there yet."""
    path = home / ".batchmill" / "batchmill.db"
    if not path.exists():
        return 0
    with contextlib.closing(sqlite3.connect(path)) as conn, contextlib.suppress(sqlite3.OperationalError):
        return int(conn.execute("SELECT count(*) FROM result").fetchone()[0])
    return 0


def fed(process: subprocess.Popen[bytes], home: Path, rest: bytes) -> tuple[int, str]:
    """Gives the first half, and the rest when that is answered; answers the exit code and what was said."""
    assert process.stdin is not None
    try:
        process.stdin.write(lines(0, HALF))
        process.stdin.flush()
        until("the first half is answered", lambda: answered_in(home) >= HALF, timeout_s=90)
        _, said = process.communicate(rest, timeout=90)
    finally:
        process.kill()
    return process.returncode, said.decode()


def test_a_pipe_is_worked_on_while_it_flows_and_gone_on_with_when_it_broke(tmp_path: Path) -> None:
    with simulated(FAST) as sim:
        (tmp_path / "batchmill.toml").write_text(TOML.format(base_url=sim.base_url))
        code, said = fed(running(tmp_path, "--key", "k", "-o", "o.jsonl"), tmp_path, lines(HALF, ROWS) + b"nonsense\n")
        again, _ = fed(running(tmp_path, "--key", "k", "-o", "o.jsonl"), tmp_path, lines(HALF, ROWS))
        calls = sim.bill()["calls"]

    assert code == 3
    assert f"stdin line {ROWS + 1}: not valid JSON" in said
    assert "run the same command with the key k: it goes on from there" in said
    assert f"{HALF:,} rows so far" in said
    assert again == 0
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == calls == ROWS
