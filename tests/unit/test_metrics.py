"""Our figures on the metrics page, exact from a prepared database, and what happens when the database is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from sqlalchemy import insert

from batchmill_core.errors import CallState
from batchmill_core.job import Rows
from batchmill_core.request import RowStatus
from batchmill_core.usage import Usage
from batchmill_db import booking, chunks, doorbells, ledger, steering, telemetry
from batchmill_db.booking import NewCall
from batchmill_db.ledger import CallEnd
from batchmill_db.schema import device_sample
from batchmill_db.session import Connection, Database, now_ms
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.metrics import MAX_AGE_S, MillCollector
from tests.prepared_jobs import PreparedFolder

Figures = dict[str, float]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    yield prepared
    prepared.database.close()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def flat(metrics: Iterator[Metric]) -> Figures:
    """Samples as the page shows them, by name and labels."""
    return {
        s.name + (f"{{{','.join(f'{k}={v}' for k, v in sorted(s.labels.items()))}}}" if s.labels else ""): s.value
        for metric in metrics
        for s in metric.samples
    }


def figures(folder: PreparedFolder) -> Figures:
    return flat(MillCollector(folder.database, queues=["api.sim"]).collect())


def test_rows_of_a_job_by_status(folder: PreparedFolder) -> None:
    job = folder.done([RowStatus.OK, RowStatus.OK, RowStatus.FAILED, RowStatus.INVALID])

    found = figures(folder)

    rows = {k: v for k, v in found.items() if k.startswith("batchmill_rows{") and v}
    assert rows == {
        f"batchmill_rows{{job={job.public_id},status={status}}}": n
        for status, n in (("ok", 2.0), ("failed", 1.0), ("invalid", 1.0))
    }
    assert found[f"batchmill_job_info{{job={job.public_id},model=sim-chat,name=reviews,state=done}}"] == 1
    assert found["batchmill_jobs{state=done}"] == 1


def test_rows_without_a_status_wait(folder: PreparedFolder) -> None:
    job = folder.submit()

    found = figures(folder)

    assert found[f"batchmill_rows{{job={job.public_id},status=waiting}}"] == 4
    assert found["batchmill_jobs{state=open}"] == 1


def test_tokens_and_cost_are_the_ledgers_sums(folder: PreparedFolder) -> None:
    folder.done()

    found = figures(folder)

    assert found["batchmill_tokens_total{account=sim,kind=input,model=sim-chat}"] == 40
    assert found["batchmill_tokens_total{account=sim,kind=output,model=sim-chat}"] == 8
    assert found["batchmill_tokens_total{account=sim,kind=reasoning,model=sim-chat}"] == 0
    assert found["batchmill_cost_usd{account=sim,model=sim-chat,state=settled}"] == pytest.approx(0.000028)
    assert found["batchmill_cost_usd{account=sim,model=sim-chat,state=unknown}"] == 0
    assert found["batchmill_calls{account=sim,model=sim-chat,state=settled}"] == 4


def test_a_settled_a_wasted_an_unknown_and_a_flying_call_are_told_apart(folder: PreparedFolder) -> None:
    job = folder.submit()
    folder.database.run(lambda conn: one_call_of_each_kind(conn, job.id))

    found = figures(folder)

    where = "account=sim,model=sim-chat"
    cost = {s: found[f"batchmill_cost_usd{{{where},state={s}}}"] for s in ("settled", "wasted", "unknown", "reserved")}
    assert cost == pytest.approx({"settled": 30e-9, "wasted": 10e-9, "unknown": 200e-9, "reserved": 100e-9})
    assert found[f"batchmill_calls_unpriced{{{where}}}"] == 1
    assert found[f"batchmill_calls_in_flight{{{where}}}"] == 1


def one_call_of_each_kind(conn: Connection, job_id: int) -> None:
    (bell,) = doorbells.ring(conn, windows={"api.sim": 1}, again_after_ms=1000)
    claim = chunks.claim(conn, bell.chunk_id, "worker", lease_ms=60_000)
    assert claim is not None

    def new(seq: int, bound: int | None) -> NewCall:
        return NewCall(
            chunk_id=claim.chunk_id,
            fence=claim.fence,
            seq=seq,
            job_id=job_id,
            round=1,
            rows=Rows.span(seq % 4, 1),
            model="sim-chat",
            worker="worker",
            account="sim",
            bound_nanousd=bound,
        )

    booking.reserve(conn, [new(0, 100), new(1, 100), new(2, 200), new(3, None), new(4, 100)], budgeted=False)
    ends = [
        CallEnd(seq=0, state=CallState.SETTLED, usage=Usage(input=1, output=1), cost_nanousd=20),
        CallEnd(seq=1, state=CallState.SETTLED, usage=Usage(input=1, output=1), cost_nanousd=10),
        CallEnd(seq=2, state=CallState.UNKNOWN, usage=None, cost_nanousd=None),
        CallEnd(seq=3, state=CallState.UNKNOWN, usage=None, cost_nanousd=None),
    ]
    ledger.settle(conn, chunk_id=claim.chunk_id, fence=claim.fence, job_id=job_id, ends=ends, budgeted=False)
    ledger.waste(conn, claim.chunk_id, claim.fence, [1])


def test_the_depth_of_a_queue_is_ready_and_leased_chunks(folder: PreparedFolder) -> None:
    folder.submit(name="one")
    folder.submit(name="two")
    folder.database.run(claim_first)

    found = figures(folder)

    assert found["batchmill_chunks{queue=api.sim,state=ready}"] == 1
    assert found["batchmill_chunks{queue=api.sim,state=leased}"] == 1
    assert found["batchmill_queue_depth{queue=api.sim}"] == 2


def claim_first(conn: Connection) -> None:
    bell = doorbells.ring(conn, windows={"api.sim": 8}, again_after_ms=1000)[0]
    assert chunks.claim(conn, bell.chunk_id, "worker", lease_ms=60_000) is not None


def test_a_queue_that_is_known_has_a_depth_of_zero_without_work(folder: PreparedFolder) -> None:
    found = figures(folder)

    assert found["batchmill_queue_depth{queue=api.sim}"] == 0
    assert found["batchmill_slots{queue=api.sim}"] == 0


def test_live_workers_count_for_each_of_their_queues(folder: PreparedFolder) -> None:
    def two(conn: Connection) -> None:
        for number, queues in enumerate((["api.sim"], ["api.sim", "api.other"])):
            telemetry.register(
                conn,
                WorkerRecord(
                    id=f"w{number}",
                    name=f"api{number}@host",
                    host="host",
                    pid=number,
                    wing="api",
                    queues=queues,
                    slots=8,
                    version="1",
                ),
            )

    folder.database.run(two)

    found = figures(folder)

    assert (found["batchmill_workers{queue=api.sim}"], found["batchmill_slots{queue=api.sim}"]) == (2, 16)
    assert (found["batchmill_workers{queue=api.other}"], found["batchmill_slots{queue=api.other}"]) == (1, 8)


def test_the_newest_sample_of_each_device(folder: PreparedFolder) -> None:
    def sample(conn: Connection) -> None:
        for ago_ms, use in ((5000, 10.0), (1000, 97.5), (600_000, 1.0)):
            values = {"at_ms": now_ms() - ago_ms, "host": "h", "device": "0", "use_percent": use}
            conn.execute(insert(device_sample).values(**values))

    folder.database.run(sample)

    found = {k: v for k, v in figures(folder).items() if k.startswith("batchmill_device_")}

    assert found == {"batchmill_device_use_percent{device=0,host=h}": 97.5}


def test_a_stopped_account_is_named(folder: PreparedFolder) -> None:
    folder.database.run(
        lambda conn: telemetry.stop_account(conn, "sim", kind="bad_key", reason="401", probe_after_ms=1000)
    )

    assert figures(folder)["batchmill_account_stopped{account=sim}"] == 1


def test_a_job_that_has_not_ended_is_shown_however_old_it_is(folder: PreparedFolder) -> None:
    old = folder.submit(name="old")
    folder.database.run(lambda conn: steering.pause(conn, old.id, kind="user", reason="later"))

    found = figures(folder)

    assert found[f"batchmill_job_info{{job={old.public_id},model=sim-chat,name=old,state=paused}}"] == 1


def test_figures_are_kept_for_two_seconds(folder: PreparedFolder) -> None:
    clock = Clock()
    collector = MillCollector(folder.database, clock=clock)
    before = flat(collector.collect())
    folder.submit()
    clock.now_s += MAX_AGE_S - 0.1
    kept = flat(collector.collect())
    clock.now_s += 0.2

    after = flat(collector.collect())

    assert kept == before
    assert after["batchmill_jobs{state=open}"] == 1


def test_a_database_that_is_away_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "no.db").mkdir()  # SQLite cannot open it
    database = Database(f"sqlite:///{tmp_path / 'no.db'}")

    assert flat(MillCollector(database).collect()) == {"batchmill_up": 0.0}


def test_nothing_is_read_before_the_page_is_asked_for(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.db'}")

    assert list(MillCollector(database).describe()) == []
    assert not (tmp_path / "new.db").exists()
