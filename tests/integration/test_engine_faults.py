"""Rows that bring an engine's process down or do not fit its device: the worker lives, and only those rows suffer."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import EngineLost
from batchmill_core.job import JobState
from batchmill_core.request import Completion, Request, RowStatus
from batchmill_db import batch_sizes
from batchmill_producers.retry import retry
from batchmill_workers.gpu.batching import length_class
from batchmill_workers.gpu.device_kind import device_kind
from batchmill_workers.parentage import DOWN_EXIT_CODE
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, Worker
from tests.integration.plugin_engine import install_engine
from tests.scripted_engine import TOKENS, ScriptedEngine

ROOT = Path(__file__).parents[2]
QUEUE = "gpu.scripted"
TIMEOUT_S = 120.0
FITS = 5


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough for an engine's faults; what SQL makes of crashes runs on both in ``test_poison``."""
    return sqlite_url


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = "scripted = tests.scripted_engine:ScriptedEngine"
    return install_engine(tmp_path / "plugins", monkeypatch, entry=entry)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """What the scripted engine takes for a model: the folder that says what its device does."""
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / "memory_rows").write_text("1000")
    return folder


def mill_with(make_mill: MakeMill, device: Path) -> Mill:
    models = f'\n[models.scripted]\nengine = "scripted"\nsource = "{device}"\ndevice_usd_per_hour = 1.0\n'
    return make_mill(tables=models)


def start(mill: Mill, plugins: Path) -> Worker:
    return mill.start_worker(env={"PYTHONPATH": f"{plugins}:{ROOT}"}, queues=[QUEUE], slots=2)


def rows(count: int, **special: int) -> list[dict[str, object]]:
    texts = {n: text for text, n in special.items()}
    return [{"n": n, "text": texts.get(n, "food")} for n in range(count)]


@pytest.mark.timeout(330)
def test_a_row_that_crashes_the_engines_process_ends_dead_alone_and_can_be_retried(
    make_mill: MakeMill, plugins: Path, device: Path
) -> None:
    (device / "segfault").touch()
    mill = mill_with(make_mill, device)
    worker = start(mill, plugins)
    job = mill.submit(rows(8, segfault=5), model="scripted", chunk_size=8)
    mill.wait_state(job, JobState.DONE, timeout_s=TIMEOUT_S)
    first = mill.invariants(job)
    (device / "segfault").unlink()
    again = retry(mill.database, mill.settings, job.id, statuses=[RowStatus.DEAD])
    mill.wait_state(job, JobState.DONE, timeout_s=TIMEOUT_S)

    assert first.by_status[RowStatus.DEAD] == 1
    assert first.by_status[RowStatus.OK] == 7
    assert again == 1
    assert mill.invariants(job).by_status[RowStatus.OK] == 8
    assert worker.alive
    assert "engine_lost" in worker.log


async def _answers(device: Path, texts: list[str]) -> list[Completion | BaseException]:
    """Of an engine that computes one row at a time."""
    engine = ScriptedEngine(model=ModelEntry(name="scripted", engine="scripted", source=str(device)), device="cpu")
    engine.use_batch_sizes({length_class(TOKENS): 1})
    await engine.start()
    try:
        calls = [engine.complete(Request(messages=({"role": "user", "content": text},))) for text in texts]
        return await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await engine.close()


def test_rows_that_waited_while_another_crashed_the_process_are_asked_again_and_not_blamed(device: Path) -> None:
    (device / "segfault").touch()

    crashed, *others = asyncio.run(_answers(device, ["segfault", "a", "b", "c"]))

    assert isinstance(crashed, EngineLost)
    assert [one.text for one in others if isinstance(one, Completion)] == ["A", "B", "C"]


@pytest.mark.timeout(200)
def test_out_of_memory_ends_neither_a_worker_nor_its_engine_and_only_what_never_fits_is_too_long(
    make_mill: MakeMill, plugins: Path, device: Path
) -> None:
    (device / "memory_rows").write_text(str(FITS))
    mill = mill_with(make_mill, device)
    worker = start(mill, plugins)
    job = mill.submit(rows(60, huge=17), model="scripted", chunk_size=20)
    mill.wait_state(job, JobState.DONE, timeout_s=TIMEOUT_S)
    done = mill.invariants(job)
    results = {r.row: r for r in mill.results(job)}
    worker.terminate()
    worker.wait_dead()
    learned = mill.database.read(lambda conn: batch_sizes.load(conn, "scripted", device_kind("cpu")))

    assert done.by_status[RowStatus.OK] == 59
    assert results[17].status == RowStatus.TOO_LONG
    assert results[17].error_kind == "too_long"
    assert not re.search("engine_lost|Traceback", worker.log)
    assert all(1 <= rows <= FITS for rows in learned.values())
    assert learned


@pytest.mark.timeout(200)
def test_a_lost_device_ends_its_worker_and_no_row_is_blamed(make_mill: MakeMill, plugins: Path, device: Path) -> None:
    (device / "lost").touch()
    mill = mill_with(make_mill, device)
    first = start(mill, plugins)
    job = mill.submit(rows(8), model="scripted", chunk_size=4)
    code = first.wait_dead(TIMEOUT_S)
    (device / "lost").unlink()
    start(mill, plugins)
    mill.wait_state(job, JobState.DONE, timeout_s=TIMEOUT_S)

    assert code == DOWN_EXIT_CODE
    assert "uncorrectable ECC" in first.log
    assert mill.invariants(job).by_status[RowStatus.OK] == 8
    assert all(chunk.crash_count == 0 for chunk in mill.chunks(job))
