"""A whole Batchmill for tests: real broker, database, provider and worker processes, all gone when the test is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import select, text

from batchmill_core.broker import make_celery, publish
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_core.settings import load_settings
from batchmill_db import chunks, counters, jobs, migrate, verify
from batchmill_db.doorbells import Doorbell
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import call, chunk, result
from batchmill_db.session import Connection, Database, DatabaseError
from batchmill_db.verify_bill import BillLine
from batchmill_ops.simulator import SimulatorConfig
from batchmill_ops.simulator.process import SimulatorHandle, simulated
from batchmill_producers.submit import Submission, submit
from batchmill_workers.dispatcher import Cadence, Dispatcher
from batchmill_workers.launch import ProcessPlan
from batchmill_workers.parentage import PARENT_FD_VARIABLE

T = TypeVar("T")
QUEUE = "api.sim"
MODEL = "sim-chat"
PROMPT = "Row {{ n }}: {{ text }}"
READY_TIMEOUT_S = 40.0
POLL_S = 0.03
_ENDED = (JobState.DONE, JobState.CANCELLED, JobState.FAILED)
_NANO = Decimal(10**9)


def until(what: str, found: Callable[[], T], *, timeout_s: float = 30.0, every_s: float = POLL_S) -> T:
    """Asks again until the answer is true and returns it; fails with ``what`` was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        if answer := found():
            return answer
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(every_s)


class Worker:
    """One worker process, with what a test may do to it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, log_path: Path) -> None:
        self.process = process
        self.name = name
        self.log_path = log_path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has said so far, on stdout and stderr."""
        return self.log_path.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Worker:
        """Waits until it takes messages; fails with its log when it ends before."""

        def ready() -> bool:
            assert self.alive, f"worker {self.name} ended with {self.process.returncode}:\n{self.log}"
            return f"{self.name} ready." in self.log

        until(f"worker {self.name} is ready", ready, timeout_s=timeout_s)
        return self

    def wait_dead(self, timeout_s: float = 30.0) -> int:
        """Waits until it has ended; answers its exit code (negative: the signal)."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"worker {self.name} still runs after {timeout_s:.0f} s:\n{self.log[-3000:]}"
            ) from None

    def kill(self) -> None:
        """SIGKILL, as the kernel out of memory would. Idempotent."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: asks it to drain."""
        self.process.send_signal(signal.SIGTERM)


class Mill:
    """One folder with its batchmill.toml, workers and jobs. ``sim`` is None when another provider was given."""

    def __init__(
        self,
        home: Path,
        *,
        broker_url: str,
        database_url: str,
        base_url: str,
        sim: SimulatorHandle | None = None,
        settings: Mapping[str, Any] | None = None,
        account: Mapping[str, Any] | None = None,
        tables: str = "",
    ) -> None:
        self.home = home
        self.sim = sim
        self.database_url = database_url
        top = {"broker_url": broker_url, "database_url": database_url, **(settings or {})}
        provider = {"base_url": base_url, "max_in_flight": 64, **(account or {})}
        text = f"{_toml(top)}\n[accounts.sim]\n{_toml(provider)}\n{_MODELS}{tables}"
        (home / "batchmill.toml").write_text(text)
        self.settings = load_settings(home, {})
        self.app = make_celery(self.settings)
        self.database = Database(database_url)
        migrate.upgrade(self.database)
        self.workers: list[Worker] = []
        self._read_end, self._write_end = os.pipe()

    # workers

    def freeze(self, worker: Worker) -> None:
        """Stops a worker between two of its transactions: one frozen inside would hold locks that others wait for."""

        def touch(conn: Connection) -> None:
            if conn.dialect.name == "postgresql":
                conn.execute(text("SET LOCAL lock_timeout = '500ms'"))
            for table in ("job", "chunk", "worker", "call"):
                conn.execute(text(f"UPDATE {table} SET state = state"))

        def stopped_outside() -> bool:
            worker.freeze()
            try:
                self.database.run(touch, patience_s=0.5)
            except DatabaseError:
                worker.thaw()
                return False
            return True

        until("the worker is frozen outside of a transaction", stopped_outside)

    def start_worker(
        self,
        name: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        queues: Sequence[str] = (QUEUE,),
        slots: int = 8,
        ready: bool = True,
    ) -> Worker:
        """Starts a worker process; without ``ready`` it is not waited for. ``env`` is added to its environment."""
        name = name or f"w{len(self.workers)}"
        plan = ProcessPlan(name=name, queues=tuple(queues), slots=slots)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        own = {
            "BATCHMILL_HOME": str(self.home),
            PARENT_FD_VARIABLE: str(self._read_end),
            **plan.variables(),
            **(env or {}),
        }
        log_path = self.home / f"{name}.log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                plan.command(),
                env=clean | own,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(self._read_end,),
            )
        node = plan.command()[plan.command().index("-n") + 1]
        worker = Worker(process, node, log_path)
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Leads from this process, so that the death of a worker never is the death of the leader too."""
        leader = Dispatcher(
            self.database,
            holder="test",
            ring=self.ring,
            take=lambda _: False,
            queues=(),
            cadence=Cadence.of(self.settings),
        )
        leader.tick()
        leader.start()
        try:
            yield
        finally:
            leader.stop()

    def ring(self, bell: Doorbell) -> None:
        publish(self.app, bell.chunk_id, bell.queue, bell.label)

    def crash(self) -> None:
        """Ends every process of this mill that still runs."""
        for worker in self.workers:
            worker.kill()

    # jobs

    def submit(self, rows: int | Sequence[Mapping[str, Any]], *, ring: bool = True, **options: Any) -> JobRecord:
        """Submits that many rows (or these) as a job; options are those of `Submission`."""
        data = (
            [{"n": n, "text": f"a great product, number {n}"} for n in range(rows)] if isinstance(rows, int) else rows
        )
        wanted = {"model": MODEL, "prompt": PROMPT, "params": {"max_tokens": 20}, "chunk_size": 25, **options}
        return submit(
            self.database, self.settings, Submission(dataset=data, **wanted), ring=self.ring if ring else None
        )

    def job(self, job_id: int) -> JobRecord:
        """The job as it stands now, all counters summed."""
        return until("the job's counters are summed", lambda: self.database.run(lambda conn: _summed(conn, job_id)))

    def wait_state(
        self, job: JobRecord, *states: JobState, timeout_s: float = 30.0, every_s: float = POLL_S
    ) -> JobRecord:
        """Waits until the job is in one of these states; fails with what is known of it."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self.database.reading() as conn:
                now = jobs.get(conn, job.id)
            if now.state in states:
                return self.job(job.id)
            assert time.monotonic() < deadline, self._stuck(job, timeout_s)
            time.sleep(every_s)

    def wait_done(self, job: JobRecord, timeout_s: float = 30.0) -> JobRecord:
        """Waits until the job is done."""
        now = self.wait_state(job, *_ENDED, JobState.PAUSED, timeout_s=timeout_s)
        assert now.state is JobState.DONE, f"the job is {now.state}: {now.reason}\n{self.logs()}"
        return now

    def wait_rows(self, job: JobRecord, count: int, timeout_s: float = 30.0) -> None:
        """Waits until that many rows are saved."""
        until(f"{count} rows are saved", lambda: len(self.saved(job)) >= count, timeout_s=timeout_s)

    def _stuck(self, job: JobRecord, timeout_s: float) -> str:
        with self.database.reading() as conn:
            counts = chunks.counts(conn, job.id)
        now = self.job(job.id)
        return (
            f"after {timeout_s:.0f} s the job is {now.state} ({now.reason}), {now.done} of {now.n_rows} rows done, "
            f"chunks {dict(counts.by_state)}\n{self.logs()}"
        )

    def logs(self, chars: int = 9000) -> str:
        return "\n".join(f"--- {w.name} (exit {w.process.poll()})\n{w.log[-chars:]}" for w in self.workers)

    # what SQL says

    def saved(self, job: JobRecord) -> set[int]:
        """Rows that have a result."""
        with self.database.reading() as conn:
            return set(conn.execute(select(result.c.row).where(result.c.job_id == job.id)).scalars())

    def chunks(self, job: JobRecord) -> list[Any]:
        with self.database.reading() as conn:
            return list(conn.execute(select(chunk).where(chunk.c.job_id == job.id).order_by(chunk.c.id)).all())

    def calls(self, job: JobRecord) -> list[Any]:
        """The job's lines in the ledger."""
        with self.database.reading() as conn:
            wanted = select(call).where(call.c.job_id == job.id).order_by(call.c.chunk_id, call.c.fence, call.c.seq)
            return list(conn.execute(wanted).all())

    def results(self, job: JobRecord) -> list[Any]:
        """The job's results in row order, as named tuples of the whole table."""
        with self.database.reading() as conn:
            return list(conn.execute(select(result).where(result.c.job_id == job.id).order_by(result.c.row)).all())

    # what the provider says

    def bill(self) -> list[BillLine]:
        """What the simulator billed, oldest first, by row."""
        assert self.sim is not None
        billed = [c for c in self.sim.bill(calls=True)["per_call"] if c["billed"]]
        return [
            BillLine(
                request_id=c["id"],
                row=_row_of(c["client_custom"]),
                cost_nanousd=int(Decimal(c["cost_usd"]) * _NANO),
            )
            for c in billed
        ]

    def sent(self) -> int:
        """How many calls reached the provider so far."""
        assert self.sim is not None
        return int(self.sim.bill()["calls"])

    # what must be true

    def invariants(self, job: JobRecord) -> JobRecord:
        """Asserts what holds for a job at rest, whatever happened to its workers; answers the job.

        Every row has exactly one final status; `doctor --verify` finds nothing; the ledger covers the provider's bill.
        """
        now = self.job(job.id)
        bill = self.bill() if self.sim is not None else None
        with self.database.reading() as conn:
            broken = verify.as_lines(verify.verify(conn, job.id, bill=bill))
        assert not broken, "\n".join([*broken, self.logs()])
        if now.state is JobState.DONE:
            assert now.done == now.n_rows, f"{now.done} of {now.n_rows} rows have a final status: {now.by_status}"
            rows = [r.row for r in self.results(job)]
            assert len(rows) == len(set(rows)) == now.n_rows - now.by_status[RowStatus.DEAD]
        if bill is not None:
            self._money(job, bill)
        return now

    def _money(self, job: JobRecord, bill: Sequence[BillLine]) -> None:
        lines = self.calls(job)
        settled = [c for c in lines if c.state == "settled" and c.http_status == 200]
        unknown = [c for c in lines if c.state in ("unknown", "reserved")]
        prices = {b.request_id: b.cost_nanousd for b in bill}
        ids = [c.request_id for c in settled if c.request_id is not None]
        doubled = [k for k, n in Counter(ids).items() if n > 1]
        assert not doubled, f"calls that are in the ledger twice: {doubled}"
        assert len(bill) <= len(settled) + len(unknown)
        billed = sum(b.cost_nanousd or 0 for b in bill)
        assert billed <= sum(c.cost_nanousd or 0 for c in settled) + sum(c.bound_nanousd or 0 for c in unknown)
        assert sum(c.cost_nanousd for c in settled) == sum(prices[i] or 0 for i in ids)

    def close(self) -> None:
        """Ends all processes and connections. Idempotent."""
        self.crash()
        self.database.close()
        self.app.close()
        for end in (self._read_end, self._write_end):
            try:
                os.close(end)
            except OSError:
                continue


@contextmanager
def milling(
    home: Path,
    *,
    broker_url: str,
    database_url: str,
    provider: SimulatorConfig | str | None = None,
    settings: Mapping[str, Any] | None = None,
    account: Mapping[str, Any] | None = None,
    tables: str = "",
) -> Iterator[Mill]:
    """A Mill for the length of a ``with`` block. ``provider`` is a simulator's configuration, or a base URL."""
    with ExitStack() as stack:
        sim = None if isinstance(provider, str) else stack.enter_context(simulated(provider))
        base_url = provider if isinstance(provider, str) else sim.base_url  # type: ignore[union-attr]  # one of both
        mill = Mill(
            home,
            broker_url=broker_url,
            database_url=database_url,
            base_url=base_url,
            sim=sim,
            settings=settings,
            account=account,
            tables=tables,
        )
        stack.callback(mill.close)
        yield mill


_MODELS = """
[models.sim-chat]
account = "sim"
price = { input = 0.40, cached_input = 0.10, output = 1.60 }

[models.sim-embed]
account = "sim"
price = { input = 0.02, output = 0 }
"""


def _summed(conn: Connection, job_id: int) -> JobRecord | None:
    """The job, or None while somebody else is at its counters."""
    counters.sum_counters(conn, [job_id])
    pending = select(chunk.c.id).where(chunk.c.job_id == job_id, chunk.c.unsummed_since_ms.is_not(None)).limit(1)
    return None if conn.execute(pending).first() else jobs.get(conn, job_id)


def _toml(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items())


def _row_of(text: str) -> int | None:
    """The row number in a prompt as `PROMPT` makes it."""
    number = text.removeprefix("Row ").partition(":")[0]
    return int(number) if text.startswith("Row ") and number.isdigit() else None
