"""The database stands still in the middle of a job: nothing of it reaches a row, and no live worker is taken for dead."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchmill_ops.simulator import SimulatorConfig
from tests.integration.harness import milling
from tests.servers import Postgres

ROWS = 200
LEASE_S = 6  # shorter than the outage, so that every lease would run out in it
OUTAGE_S = 8.0

Outage = Callable[[], None]


@contextmanager
def _frozen_postgres(_: Path) -> Iterator[tuple[str, Outage]]:
    with _own_postgres() as server, server.database() as url:

        def outage() -> None:
            server.freeze()
            time.sleep(OUTAGE_S)
            server.thaw()

        yield url, outage


@contextmanager
def _crashed_postgres(_: Path) -> Iterator[tuple[str, Outage]]:
    with _own_postgres() as server, server.database() as url:

        def outage() -> None:
            server.crash()
            time.sleep(OUTAGE_S)
            server.start()

        yield url, outage


@contextmanager
def _locked_sqlite(folder: Path) -> Iterator[tuple[str, Outage]]:
    """Somebody opened the file by hand, began to write, and went for coffee."""
    path = folder / "batchmill.db"

    def outage() -> None:
        with sqlite3.connect(path, isolation_level=None, timeout=30) as conn:
            conn.execute("BEGIN IMMEDIATE")
            time.sleep(OUTAGE_S)
            conn.execute("ROLLBACK")
        conn.close()

    yield f"sqlite:///{path}", outage


@contextmanager
def _moved_sqlite(folder: Path) -> Iterator[tuple[str, Outage]]:
    """Somebody tidied up, and put it back."""
    aside = folder / "aside"
    aside.mkdir()

    def outage() -> None:
        for file in folder.glob("batchmill.db*"):
            file.rename(aside / file.name)
        time.sleep(OUTAGE_S)
        for file in aside.iterdir():
            file.rename(folder / file.name)

    yield f"sqlite:///{folder / 'batchmill.db'}", outage


@contextmanager
def _own_postgres() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="batchmill-postgres-"))
    server = Postgres(folder, durable=True)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("stand", [_frozen_postgres, _crashed_postgres, _locked_sqlite, _moved_sqlite])
def test_a_database_that_stands_still_costs_time_and_no_row(
    stand: Callable[..., object], tmp_path: Path, valkey_url: str
) -> None:
    with (
        stand(tmp_path) as (database_url, outage),  # type: ignore[attr-defined]  # a context manager
        milling(
            tmp_path,
            broker_url=valkey_url,
            database_url=database_url,
            provider=SimulatorConfig(latency_s=0.1),
            settings={"lease_s": LEASE_S},
            account={"max_in_flight": 10},
        ) as mill,
    ):
        worker = mill.start_worker()
        job = mill.submit(ROWS)
        mill.wait_rows(job, 20)
        outage()
        saved = len(mill.saved(job))
        done = mill.wait_done(job, timeout_s=60)

        assert 20 <= saved < ROWS
        assert done.by_status["ok"] == ROWS
        assert {c.crash_count for c in mill.chunks(job)} == {0}
        assert len(mill.bill()) == ROWS
        assert worker.alive
        mill.invariants(job)
