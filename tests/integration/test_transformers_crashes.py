"""A job on the transformers engine whose engine process and then whose worker are killed in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from batchmill_core.request import RowStatus
from batchmill_db.jobs import JobRecord
from tests import tiny_models
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, Worker, until

ROWS = 160
LOAD_TIMEOUT_S = 200.0
TIMEOUT_S = 150.0
QUEUE = "gpu.tiny"


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: what SQL makes of killed workers runs on both in ``test_failpoints``."""
    return sqlite_url


def submit(mill: Mill) -> JobRecord:
    rows = [{"text": "cat " * (1 + n % 7) + str(n)} for n in range(ROWS)]
    params = {"max_tokens": 24, "temperature": 0}
    return mill.submit(rows, model="tiny", prompt="{{ text }}", params=params, chunk_size=16)


def start(mill: Mill) -> Worker:
    return mill.start_worker(queues=[QUEUE], slots=2, ready=False).wait_ready(LOAD_TIMEOUT_S)


def engine_of(worker: Worker) -> psutil.Process:
    children = psutil.Process(worker.pid).children(recursive=True)
    return next(child for child in children if "transformers_process" in " ".join(child.cmdline()))


def texts(mill: Mill, job: JobRecord) -> dict[int, str]:
    return {result.row: result.output for result in mill.results(job)}


@pytest.mark.timeout(600)
def test_every_row_is_answered_once_and_as_if_nothing_had_died(make_mill: MakeMill, tmp_path: Path) -> None:
    model = tiny_models.save_llama(tmp_path / "model")
    table = f'\n[models.tiny]\nengine = "transformers"\nsource = "{model}"\ndevice_usd_per_hour = 1.0\n'
    mill = make_mill(settings={"lease_s": 4}, tables=f"{table}options = {{ max_rows = 4 }}\n")
    worker = start(mill)
    job = submit(mill)
    mill.wait_rows(job, 8, timeout_s=TIMEOUT_S)
    os.kill(engine_of(worker).pid, signal.SIGKILL)
    mill.wait_rows(job, ROWS // 3, timeout_s=TIMEOUT_S)
    orphan = engine_of(worker)
    left = ROWS - len(mill.saved(job))
    worker.kill()
    until("the killed worker's engine is gone", lambda: not orphan.is_running(), timeout_s=60)
    start(mill)
    mill.wait_done(job, timeout_s=TIMEOUT_S)
    undisturbed = submit(mill)
    mill.wait_done(undisturbed, timeout_s=TIMEOUT_S)

    assert left > 0, "the job was done before its worker was killed"
    counts = mill.invariants(job).by_status
    assert counts[RowStatus.OK] + counts[RowStatus.TRUNCATED] == ROWS
    assert texts(mill, job) == texts(mill, undisturbed)
    assert "engine_lost" in worker.log
