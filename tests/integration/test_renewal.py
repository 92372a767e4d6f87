"""A worker that has done enough makes room for a fresh one: drained, at once, and no row is asked twice for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from batchmill_core.request import RowStatus
from batchmill_db.schema import worker
from batchmill_ops.simulator import SimulatorConfig
from batchmill_workers.launch import ProcessPlan
from tests.integration.conftest import MakeMill
from tests.integration.harness import QUEUE, Mill, until
from tests.integration.plugin_engine import install_engine
from tests.integration.supervised import supervised

ENGINE = '''
    """An engine that keeps 40 MiB of every row, as a leak in a library would."""

    from batchmill_core.request import Completion
    from batchmill_core.usage import Usage


    class LeakyEngine:
        capacity_rows = 2
        context_tokens = None

        def __init__(self, *, model, device):
            self.kept = []

        async def start(self):
            pass

        async def complete(self, request):
            self.kept.append(b"x" * (40 << 20))
            return Completion(text="ok", finish_reason="stop", usage=Usage(input=1, output=1), device_ns=1, latency_ms=1)

        async def close(self):
            pass
'''


def _pids(mill: Mill) -> set[int]:
    with mill.database.reading() as conn:
        return set(conn.execute(select(worker.c.pid)).scalars())


def _log(mill: Mill, name: str) -> str:
    return (mill.home / "logs" / f"{name}.log").read_text()


def test_after_its_chunks_an_api_worker_is_renewed_and_no_row_is_asked_twice(make_mill: MakeMill) -> None:
    mill = make_mill(provider=SimulatorConfig(latency_s=0.02), settings={"worker_max_chunks": 3, "lease_s": 8})
    job = mill.submit(60, chunk_size=10)
    with supervised(mill.home, mill.settings, [ProcessPlan(name="api0", queues=(QUEUE,), slots=2)]):
        mill.wait_done(job, timeout_s=90)
        until("a fresh worker has started", lambda: len(_pids(mill)) >= 2)

    assert "worker_renews name=api0@" in _log(mill, "api0")
    assert "worker_max_chunks is 3" in _log(mill, "api0")
    assert len(mill.bill()) == 60
    assert {(c.crash_count, c.fail_count) for c in mill.chunks(job)} == {(0, 0)}
    mill.invariants(job)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install_engine(tmp_path / "plugins", monkeypatch, entry="leaky = leaky:LeakyEngine", code=ENGINE)


def test_past_its_memory_a_device_worker_is_renewed_and_no_row_is_asked_twice(
    make_mill: MakeMill, plugins: Path
) -> None:
    models = f'\n[models.leaky]\nengine = "leaky"\nsource = "{plugins}"\ndevice_usd_per_hour = 1.0\n'
    mill = make_mill(settings={"worker_max_memory_mb": 400, "lease_s": 8}, tables=models)
    job = mill.submit(24, model="leaky", chunk_size=4)
    plan = ProcessPlan(name="cpu0", queues=("gpu.leaky",), slots=1)
    with supervised(mill.home, mill.settings, [plan], env={"PYTHONPATH": str(plugins)}):
        done = mill.wait_done(job, timeout_s=120)
        pids = _pids(mill)

    assert len(pids) >= 2
    assert "worker_max_memory_mb is 400" in _log(mill, "cpu0")
    assert done.by_status[RowStatus.OK] == 24
    assert len([c for c in mill.calls(job) if c.state == "settled"]) == 24
    assert {(c.crash_count, c.fail_count) for c in mill.chunks(job)} == {(0, 0)}
    mill.invariants(job)
