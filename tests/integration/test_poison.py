"""A row that brings its worker down again and again is found by halving, and harms no other row."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_producers.retry import retry
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, until
from tests.integration.plugin_engine import install_engine

ROWS = 8
POISON = 5
ENGINE = '''
    """An engine that some rows kill, as a bug in a driver would, for as long as the file named by its source is there."""

    import os
    import signal
    from pathlib import Path

    from batchmill_core.request import Completion
    from batchmill_core.usage import Usage


    class FragileEngine:
        capacity_rows = 4
        context_tokens = None

        def __init__(self, *, model, device):
            self.bug = Path(model.source)

        async def start(self):
            pass

        async def complete(self, request):
            text = request.messages[-1]["content"]
            if "poison" in text and self.bug.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return Completion(
                text=text.upper(), finish_reason="stop", usage=Usage(input=1, output=1), device_ns=1_000, latency_ms=1
            )

        async def close(self):
            pass
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install_engine(tmp_path / "plugins", monkeypatch, entry="fragile = fragile:FragileEngine", code=ENGINE)


def _run_with_a_new_worker_for_each_that_dies(mill: Mill, job_id: int, plugins: Path) -> None:
    env = {"PYTHONPATH": str(plugins)}

    def ended() -> bool:
        if not mill.workers or not mill.workers[-1].alive:
            mill.start_worker(env=env, queues=["gpu.fragile"], slots=2, ready=False)
        return mill.job(job_id).state is JobState.DONE

    until("the job is done", ended, timeout_s=150, every_s=0.1)


@pytest.mark.timeout(330)
def test_a_row_that_kills_its_workers_ends_dead_alone_and_can_be_retried(make_mill: MakeMill, plugins: Path) -> None:
    bug = plugins / "bug"
    bug.touch()
    models = f'\n[models.fragile]\nengine = "fragile"\nsource = "{bug}"\ndevice_usd_per_hour = 1.0\n'
    mill = make_mill(settings={"lease_s": 4}, tables=models)
    rows = [{"n": n, "text": "poison" if n == POISON else "food"} for n in range(ROWS)]
    with mill.leading():
        job = mill.submit(rows, model="fragile", chunk_size=ROWS)
        _run_with_a_new_worker_for_each_that_dies(mill, job.id, plugins)
        died = sum(not w.alive for w in mill.workers)
        first = mill.invariants(job)
        bug.unlink()
        again = retry(mill.database, mill.settings, job.id, statuses=[RowStatus.DEAD])
        _run_with_a_new_worker_for_each_that_dies(mill, job.id, plugins)

    assert first.by_status[RowStatus.DEAD] == 1
    assert first.by_status[RowStatus.OK] == ROWS - 1
    assert 3 <= died <= 7
    assert again == 1
    assert mill.invariants(job).by_status[RowStatus.OK] == ROWS
    assert len(mill.saved(job)) == ROWS
