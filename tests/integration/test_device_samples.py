"""A real worker with a real model samples this host's processor, and `batchmill gpus` shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select

from batchmill.cli import main
from batchmill_core.broker import make_celery
from batchmill_core.catalog import Catalog
from batchmill_core.settings import Settings
from batchmill_db import schema
from batchmill_db.session import Database
from batchmill_producers.submit import Submission, submit
from batchmill_workers.lifecycle import WorkerProcess
from tests.conformance.db.world import World
from tests.conformance.engine_host import SMOLLM2
from tests.integration.harness import until
from tests.mill import new_database, settings_for

ROWS = [{"text": f"number {n}"} for n in range(6)]


class Folder(NamedTuple):
    """A worker that runs, on a database of its own."""

    settings: Settings
    database: Database
    worker: WorkerProcess


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    database = new_database(tmp_path)
    settings = settings_for(tmp_path, Catalog(models={"smollm2": SMOLLM2}), sample_every_s=0.2)
    app = make_celery(settings, broker_url="memory://")
    worker = WorkerProcess(settings, app, name="cpu@test", queues=["gpu.smollm2"], slots=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHMILL_DATABASE_URL", settings.database_address)
    try:
        worker.start()
        yield Folder(settings, database, worker)
    finally:
        worker.stop()
        database.close()


def test_a_worker_records_what_its_device_and_engine_do(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Submission(dataset=ROWS, model="smollm2", prompt="Say {{ text }}", params={"max_tokens": 12})
    job = submit(folder.database, folder.settings, asked)
    with folder.database.reading() as conn:
        (chunk_id,) = conn.execute(select(schema.chunk.c.id)).scalars()

    folder.worker.run_chunk(chunk_id)
    until("tokens were sampled", lambda: any(x["tokens_per_s"] for x in samples(folder.database)))
    World(folder.database).get(job.id)  # sums, as the leader would
    code = main(["gpus", "--json"])
    (device,) = json.loads(capsys.readouterr().out)
    main(["gpus", "--once"])
    table = capsys.readouterr().out

    found = samples(folder.database)
    assert code == 0
    assert {(x["device"], x["worker"], x["model"]) for x in found} == {("cpu", "cpu@test", "smollm2")}
    assert any(x["running"] for x in found)
    assert any(x["use_percent"] for x in found)
    assert sum(x["bubble_ms"] for x in found) > 0  # from the claim to the first row that ran
    assert (device["device"], device["models"], device["workers"]) == ("cpu", ["smollm2"], ["cpu@test"])
    assert device["memory_percent"] > 0
    assert device["p99_ms"] > 0
    assert "cpu smollm2" in table


def samples(database: Database) -> list[dict[str, Any]]:
    return World(database).table(schema.device_sample)
