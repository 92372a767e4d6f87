"""One worker process without Celery's consumer: real settings, a SQLite file, our own code from submit to export.

The process is the one that Celery would start, on its own event loop and SQL thread; tests call its ``run_chunk`` as a
delivered message would. Its dispatcher ticks only when a test says so. Waiting is told to `SkippedTime`, not slept.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from batchmill_core.broker import make_celery
from batchmill_core.catalog import Account, Catalog, ModelEntry
from batchmill_core.settings import Settings
from batchmill_core.usage import Price
from batchmill_db import counters, jobs, migrate, steering
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import call, chunk, result
from batchmill_db.session import Database
from batchmill_db.verify import as_lines, verify
from batchmill_producers.export import write_results
from batchmill_producers.submit import Submission, submit
from batchmill_workers import chunk_run
from batchmill_workers.answer import answer
from batchmill_workers.api_lane import ApiLane
from batchmill_workers.lifecycle import WorkerProcess

PRICE = Price.from_usd_per_mtok({"input": "0.40", "cached_input": "0.10", "output": "1.60"})
ACCOUNT = "acme"
MODEL = "m-1"
QUEUE = f"api.{ACCOUNT}"
_NEVER_S = 86_400.0
_UNREACHABLE = "http://127.0.0.1:9/v1"


class SkippedTime:
    """A clock that a wait moves on at once. ``waits`` are the seconds that somebody wanted to sleep."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self._ahead_s = 0.0

    def clock(self) -> float:
        return time.monotonic() + self._ahead_s

    def skip(self, seconds: float) -> None:
        self._ahead_s += seconds

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.skip(seconds)
        await asyncio.sleep(0)


class Mill:
    """What a test of the whole way holds in its hands."""

    def __init__(self, settings: Settings, database: Database, process: WorkerProcess, time: SkippedTime) -> None:
        self.settings = settings
        self.database = database
        self.process = process
        self.time = time

    def submit(self, rows: Sequence[Mapping[str, Any]] = ({"text": "hi"},), **options: Any) -> JobRecord:
        wanted = {"model": MODEL, "prompt": "Label: {{ text }}", "params": {"max_tokens": 20}, **options}
        return submit(self.database, self.settings, Submission(dataset=list(rows), **wanted))

    def run(self, job: JobRecord) -> list[str]:
        """Delivers chunks that are due until none is; answers the words that Flower would show for each."""
        words = []
        while not self.process.draining and (chunk_id := self._due(job)) is not None:
            words.append(self.process.run_chunk(chunk_id))
        return words

    def _due(self, job: JobRecord) -> int | None:
        with self.database.reading() as conn:
            if jobs.get(conn, job.id).state != "open":
                return None
            now_ms = int(time.time() * 1000)
            return conn.execute(
                select(chunk.c.id)
                .where(chunk.c.job_id == job.id, chunk.c.state == "ready", chunk.c.not_before_ms <= now_ms)
                .order_by(chunk.c.id)
                .limit(1)
            ).scalar_one_or_none()

    def let_pass(self, job: JobRecord, seconds: float) -> None:
        """Moves the clocks of the account and of the job's waiting chunks on."""
        self.time.skip(seconds)
        with self.database.transaction() as conn:
            conn.execute(
                text("UPDATE chunk SET not_before_ms = not_before_ms - :ms WHERE job_id = :job AND not_before_ms > 0"),
                {"ms": int(seconds * 1000), "job": job.id},
            )

    def job(self, job: JobRecord) -> JobRecord:
        """The job as it stands now, with everything summed and closed that can be."""
        self.database.run(steering.finish)
        self.database.run(counters.sum_counters)
        with self.database.reading() as conn:
            return jobs.get(conn, job.id)

    def rows(self, job: JobRecord) -> list[dict[str, Any]]:
        return self._all(select(result).where(result.c.job_id == job.id).order_by(result.c.row))

    def calls(self, job: JobRecord) -> list[dict[str, Any]]:
        """The ledger of a job in the order the calls were booked."""
        return self._all(
            select(call).where(call.c.job_id == job.id).order_by(call.c.chunk_id, call.c.fence, call.c.seq)
        )

    def chunks(self, job: JobRecord) -> list[dict[str, Any]]:
        return self._all(select(chunk).where(chunk.c.job_id == job.id).order_by(chunk.c.id))

    def _all(self, query: Any) -> list[dict[str, Any]]:
        with self.database.reading() as conn:
            return [dict(r._mapping) for r in conn.execute(query)]

    def violations(self, job: JobRecord) -> list[str]:
        with self.database.reading() as conn:
            return as_lines(verify(conn, job.id))

    def exported(self, job: JobRecord) -> list[dict[str, Any]]:
        out = io.BytesIO()
        write_results(self.database, job.id, out)
        return [json.loads(line) for line in out.getvalue().splitlines()]


def catalog_for(base_url: str = _UNREACHABLE, *, price: Price | None = PRICE, **account: Any) -> Catalog:
    """One account with one model."""
    options = {"max_in_flight": 4, "timeout_s": 10.0, "max_retries": 2, **account}
    return Catalog(
        accounts={ACCOUNT: Account(name=ACCOUNT, base_url=base_url, **options)},
        models={MODEL: ModelEntry(name=MODEL, account=ACCOUNT, price=price)},
    )


def settings_for(folder: Path, catalog: Catalog, **options: Any) -> Settings:
    """Settings whose threads do nothing by themselves within a test."""
    quiet = {"publish_every_s": _NEVER_S, "reap_every_s": _NEVER_S, "drain_s": 5.0, **options}
    return Settings(home=folder, database_url=f"sqlite:///{folder / 'batchmill.db'}", catalog=catalog, **quiet)


def new_database(folder: Path) -> Database:
    """A SQLite file with the tables and nothing in them."""
    path = folder / "batchmill.db"
    path.write_bytes(_migrated())
    return Database(f"sqlite:///{path}")


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batchmill.db"
        database = Database(f"sqlite:///{path}")
        migrate.upgrade(database)
        database.close()
        return path.read_bytes()


@contextmanager
def milling(folder: Path, catalog: Catalog, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Mill]:
    """A worker process of its own on a new database, for the length of a ``with`` block."""
    database = new_database(folder)
    settings = settings_for(folder, catalog, **options)
    skipped = SkippedTime()
    patch.setattr(chunk_run, "answer", partial(answer, sleep=skipped.sleep))
    app = make_celery(settings, broker_url="memory://")
    queues = [a.queue for a in catalog.accounts.values()]
    process = WorkerProcess(settings, app, name="w1@test", queues=queues, slots=2)
    process.recorder._gap_s = 0.001  # a test has few rows: none waits for company
    try:
        process.start()
        for lane in process._lanes.values():
            if isinstance(lane, ApiLane):
                lane.engine.quota.clock = skipped.clock
        yield Mill(settings, database, process, skipped)
    finally:
        process.stop()
        database.close()


def on_loop(mill: Mill, act: Callable[[], Awaitable[Any]]) -> Any:
    """Runs ``act`` on the worker's event loop and waits for it."""

    async def acting() -> Any:
        return await act()

    return mill.process.call(acting())
