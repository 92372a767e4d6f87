"""What a beat tells SQL, and what it hears: extended leases, lost leases, jobs that were stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, text

from batchmill_db import chunks, reaping, steering, telemetry
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import chunk, worker
from batchmill_db.telemetry import WorkerRecord
from batchmill_producers.submit import Submission, submit
from batchmill_workers import heartbeat as module
from batchmill_workers.heartbeat import HUNG_LOOP_EXIT_CODE, Heartbeat
from tests.mill import MODEL, QUEUE, catalog_for, new_database, settings_for


class Ward:
    """A worker with one leased chunk; ``told`` is what its run was asked to stop for."""

    def __init__(self, folder: Path) -> None:
        self.database = new_database(folder)
        wanted = Submission(dataset=[{"text": "x"}], model=MODEL, prompt="{{ text }}")
        self.job: JobRecord = submit(self.database, settings_for(folder, catalog_for()), wanted)
        record = WorkerRecord(id="w", name="w", host="h", pid=1, wing="api", queues=[QUEUE], slots=1, version="1")
        self.database.run(lambda conn: telemetry.register(conn, record))
        claim = self.database.run(lambda conn: chunks.claim(conn, 1, "w", lease_ms=60_000))
        self.told: list[str] = []
        self.run: Any = SimpleNamespace(claim=claim, attempt=SimpleNamespace(lost=False), stop=self.told.append)
        self.loop = asyncio.new_event_loop()
        self.heartbeat = Heartbeat(
            self.database, self.loop, worker_id="w", runs={1: self.run}, describe=lambda: ("ready", 7, "throttled"),
            beat_s=0.01, lease_ms=60_000, hung_after_s=30.0,
        )  # fmt: skip

    def beat(self, *, extend: bool = True) -> None:
        self.heartbeat._beat(extend=extend)
        self.turn()

    def turn(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))

    def sql(self, statement: str) -> None:
        with self.database.transaction() as conn:
            conn.execute(text(statement))

    def one(self, query: Any) -> Any:
        with self.database.reading() as conn:
            return conn.execute(query).scalar_one()


@pytest.fixture
def ward(tmp_path: Path) -> Iterator[Ward]:
    made = Ward(tmp_path)
    yield made
    made.loop.close()
    made.database.close()


def test_a_beat_extends_the_leases_and_says_what_the_worker_does(ward: Ward) -> None:
    ward.sql("UPDATE chunk SET lease_until_ms = 1")
    ward.sql("UPDATE worker SET beat_ms = 1")

    ward.beat()

    assert ward.one(select(chunk.c.lease_until_ms)) > time.time() * 1000 + 50_000
    assert ward.one(select(worker.c.beat_ms)) > time.time() * 1000 - 10_000
    assert ward.one(select(worker.c.in_flight)) == 7
    assert ward.one(select(worker.c.throttled)) == "throttled"
    assert (ward.told, ward.run.attempt.lost) == ([], False)


def test_between_two_beats_only_control_is_looked_at(ward: Ward) -> None:
    ward.sql("UPDATE chunk SET lease_until_ms = 1")

    ward.beat(extend=False)

    assert ward.one(select(chunk.c.lease_until_ms)) == 1


def test_a_lost_lease_stops_its_run(ward: Ward) -> None:
    ward.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=["w"]))
    ward.database.run(reaping.reap)

    ward.beat()

    assert ward.run.attempt.lost
    assert ward.told == ["lease lost"]


@pytest.mark.parametrize("end", ["pause", "cancel"])
def test_a_paused_or_cancelled_job_stops_its_runs_between_two_beats(ward: Ward, end: str) -> None:
    if end == "pause":
        ward.database.run(lambda conn: steering.pause(conn, ward.job.id, kind="user", reason="by hand"))
    else:
        ward.database.run(lambda conn: steering.cancel(conn, ward.job.id))

    ward.beat(extend=False)

    assert len(ward.told) == 1
    assert ward.told[0].startswith("job ")


def test_the_thread_beats_by_itself_until_it_is_stopped(ward: Ward) -> None:
    ward.sql("UPDATE worker SET beat_ms = 1")
    beaten = []
    ward.heartbeat.touched = lambda: beaten.append(1)

    ward.heartbeat.start()
    for _ in range(1000):
        if beaten:
            break
        time.sleep(0.005)
    ward.heartbeat.stop()

    assert ward.one(select(worker.c.beat_ms)) > 1
    assert not ward.heartbeat._thread.is_alive()


def test_a_loop_that_hangs_ends_the_process(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    ward.heartbeat._turned = time.monotonic() - 31

    ward.heartbeat._watch_loop()

    assert ended == [HUNG_LOOP_EXIT_CODE]


def test_a_loop_that_turns_is_left_alone(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    ward.heartbeat._turned = time.monotonic() - 29
    ward.heartbeat._watch_loop()
    ward.turn()

    ward.heartbeat._watch_loop()

    assert ended == []
    assert time.monotonic() - ward.heartbeat._turned < 5
