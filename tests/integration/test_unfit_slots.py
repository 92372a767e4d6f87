"""A slot that cannot work takes no work: it says why once, and no chunk pays for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import telemetry
from batchmill_workers.deaths import LIMIT
from batchmill_workers.launch import Supervisor, plan_gpu
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, until
from tests.integration.plugin_engine import install_engine
from tests.integration.supervised import supervised

ENGINE = '''
    """An engine that is what the file named by its source says: ill, dying, down or well."""

    from pathlib import Path

    from batchmill_core.errors import EngineDown, EngineLost
    from batchmill_core.request import Completion
    from batchmill_core.usage import Usage


    class MoodyEngine:
        capacity_rows = 4
        context_tokens = None

        def __init__(self, *, model, device):
            self.mood = Path(model.source)

        async def start(self):
            if self.mood.read_text() == "ill":
                raise ZeroDivisionError("a bug in a plug-in")

        async def complete(self, request):
            mood = self.mood.read_text()
            if mood == "dying":
                raise EngineLost("the engine's process was killed by signal 7", device_ns=1)
            if mood == "down":
                self.mood.write_text("well")
                raise EngineDown("the model cannot be loaded again: CUDA error 999")
            return Completion(text="ok", finish_reason="stop", usage=Usage(input=1, output=1), device_ns=1, latency_ms=1)

        async def close(self):
            pass
'''


@pytest.fixture
def mood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how the engine is; its package is installed for this process and its workers."""
    install_engine(tmp_path / "plugins", monkeypatch, entry="moody = moody:MoodyEngine", code=ENGINE)
    return tmp_path / "mood"


def _mill(make_mill: MakeMill, engine: str, source: Path, **settings: object) -> Mill:
    tables = f'\n[models.m]\nengine = "{engine}"\nsource = "{source}"\ndevice_usd_per_hour = 1.0\n'
    return make_mill(settings={"lease_s": 8, **settings}, tables=tables)


def _serving(mill: Mill, env: Mapping[str, str] | None = None) -> AbstractContextManager[Supervisor]:
    return supervised(mill.home, mill.settings, plan_gpu(mill.settings, "m", "cpu"), env=env)


def test_a_slot_whose_model_is_broken_says_so_once_and_no_chunk_counts_an_attempt(
    make_mill: MakeMill, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    mill = _mill(make_mill, "openvino", broken)
    job = mill.submit(4, model="m", chunk_size=2)
    with mill.leading(), _serving(mill) as supervisor:
        until("the slot is unfit", lambda: supervisor.unfit, timeout_s=60)
        said, alive = supervisor.unfit, supervisor.alive
        unfit = mill.database.run(telemetry.unfit_workers)

    assert alive == 0
    assert len(said) == len(unfit) == 1
    assert f"cannot be loaded from {broken}" in said[0]
    assert {(c.state, c.fence, c.crash_count, c.fail_count) for c in mill.chunks(job)} == {("ready", 0, 0, 0)}
    assert mill.calls(job) == []


def test_a_bug_in_an_engine_that_does_not_start_makes_its_slot_unfit_too(make_mill: MakeMill, mood: Path) -> None:
    mood.write_text("ill")
    mill = _mill(make_mill, "moody", mood)
    with _serving(mill, {"PYTHONPATH": str(mood.parent / "plugins")}) as supervisor:
        until("the slot is unfit", lambda: supervisor.unfit, timeout_s=60)
        said = supervisor.unfit

    assert "model m cannot be loaded: ZeroDivisionError: a bug in a plug-in" in said[0]


def test_an_engine_that_dies_again_and_again_makes_its_slot_unfit_before_rows_are_given_up(
    make_mill: MakeMill, mood: Path
) -> None:
    mood.write_text("dying")
    mill = _mill(make_mill, "moody", mood, gpu_slots=1)
    job = mill.submit(16, model="m", chunk_size=16)
    with mill.leading(), _serving(mill, {"PYTHONPATH": str(mood.parent / "plugins")}) as supervisor:
        until("the slot is unfit", lambda: supervisor.unfit, timeout_s=90)
        said, alive = supervisor.unfit, supervisor.alive

    now = mill.job(job.id)
    assert alive == 0
    assert f"the engine died {LIMIT} times without one answer" in said[0]
    assert "killed by signal 7" in said[0]
    assert now.state is JobState.OPEN
    assert now.by_status[RowStatus.DEAD] == 0
    assert all(c.state in {"ready", "done"} for c in mill.chunks(job))


def test_an_engine_that_cannot_be_started_again_gets_a_new_worker_and_rows_keep_their_turn(
    make_mill: MakeMill, mood: Path
) -> None:
    mood.write_text("down")
    mill = _mill(make_mill, "moody", mood, gpu_slots=1)
    job = mill.submit(8, model="m", chunk_size=4)
    with _serving(mill, {"PYTHONPATH": str(mood.parent / "plugins")}):
        done = mill.wait_done(job, timeout_s=90)
        log = (mill.home / "logs" / "cpu0.m.log").read_text()

    assert done.by_status[RowStatus.OK] == 8
    assert "engine_down" in log
    assert {(c.crash_count, c.fail_count) for c in mill.chunks(job)} == {(0, 0)}
    mill.invariants(job)
