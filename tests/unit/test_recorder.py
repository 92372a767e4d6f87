"""The recorder on a real SQLite file: what is saved together, what waits, and what a fault harms."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, exc, func, select

from batchmill_core.errors import CallState
from batchmill_core.job import Rows
from batchmill_core.request import RowStatus
from batchmill_core.usage import Usage
from batchmill_db import chunks, reaping
from batchmill_db.booking import NewCall
from batchmill_db.chunks import Child, Claim
from batchmill_db.ledger import CallEnd
from batchmill_db.results import NewResult
from batchmill_db.schema import call, chunk, result
from batchmill_db.session import DatabaseError, DatabaseUnavailable
from batchmill_producers.submit import Submission, submit
from batchmill_workers.recorder import Attempt, Recorder
from tests.mill import MODEL, QUEUE, catalog_for, new_database, settings_for

ROWS = 10
LONG_S = 3600.0


class Desk:
    """A recorder on a loop of its own, and one claimed chunk of ten rows."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.database = new_database(folder)
        settings = settings_for(folder, catalog_for())
        rows = [{"text": str(i)} for i in range(ROWS)]
        wanted = Submission(dataset=rows, model=MODEL, prompt="{{ text }}", params={"max_tokens": 1}, chunk_size=ROWS)
        self.job = submit(self.database, settings, wanted)
        self.commits = 0
        event.listen(self.database.engine, "commit", self._committed)
        self.options = options

    def _committed(self, _: Connection) -> None:
        self.commits += 1

    def go(self, act: Callable[[Recorder, Attempt], Awaitable[Any]]) -> Any:
        """Runs ``act`` on a loop with a started recorder and a claimed attempt."""

        async def acting() -> Any:
            recorder = Recorder(self.database, asyncio.get_running_loop(), **self.options)
            recorder.start()
            try:
                attempt = recorder.attempt(await recorder.run(self.claim))
                return await asyncio.wait_for(act(recorder, attempt), 10)
            finally:
                await asyncio.to_thread(recorder.stop)

        return asyncio.run(acting())

    def claim(self, conn: Connection) -> Claim:
        claim = chunks.claim(conn, 1, "w", lease_ms=60_000)
        assert claim is not None
        return claim

    def one(self, query: Any) -> Any:
        with self.database.reading() as conn:
            return conn.execute(query).scalar_one()

    def saved(self) -> int:
        return int(self.one(select(func.count()).select_from(result)))

    def call_states(self) -> list[str]:
        with self.database.reading() as conn:
            return list(conn.execute(select(call.c.state).order_by(call.c.seq)).scalars())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, gap_s=0.001)
    yield made
    made.database.close()


@pytest.fixture
def slow_desk(tmp_path: Path) -> Iterator[Desk]:
    """Its recorder commits nothing by itself but full groups."""
    made = Desk(tmp_path, gap_s=LONG_S, group_rows=4, capacity_rows=8)
    yield made
    made.database.close()


def answered(row: int, seq: int = 0, **fields: Any) -> NewResult:
    return NewResult(
        row=row, **{"status": RowStatus.OK, "output": f"answer {row}", "seqs": (seq or row + 1,), **fields}
    )


def settled(seq: int) -> CallEnd:
    return CallEnd(seq=seq, state=CallState.SETTLED, usage=Usage(input=4, output=1), cost_nanousd=10, bound_nanousd=30)


def calls_of(attempt: Attempt, *seqs: int) -> list[NewCall]:
    claim = attempt.claim
    about = {"chunk_id": claim.chunk_id, "fence": claim.fence, "job_id": claim.job_id, "round": 1}
    return [
        NewCall(**about, seq=s, rows=Rows.of([s - 1]), model=MODEL, worker="w", account="acme", bound_nanousd=30)
        for s in seqs
    ]


def put(recorder: Recorder, attempt: Attempt, *rows: int) -> None:
    for row in rows:
        recorder.put(attempt, [answered(row)], [settled(row + 1)])


async def until(happened: Callable[[], Any]) -> None:
    """Lets the loop turn until another thread has done it; `go` ends a test that waits too long."""
    while not happened():  # noqa: ASYNC110  # the other thread tells nobody
        await asyncio.sleep(0.002)


# Group commit


def test_rows_that_come_together_are_saved_in_one_transaction(slow_desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        before = slow_desk.commits
        put(recorder, attempt, 0, 1, 2, 3)
        await until(lambda: slow_desk.commits > before)

        assert slow_desk.commits == before + 1

    slow_desk.go(act)

    assert slow_desk.saved() == 4


def test_an_idle_recorder_saves_at_once(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        put(recorder, attempt, 0)

        await until(lambda: desk.saved() == 1)

    desk.go(act)


def test_a_reservation_rides_with_what_is_to_be_saved(slow_desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        before = slow_desk.commits
        booking = asyncio.ensure_future(recorder.reserve(calls_of(attempt, 1, 2), budgeted=False))
        await asyncio.sleep(0)
        put(recorder, attempt, 4, 5, 6, 7)
        reservation = await booking

        assert (reservation.accepted, slow_desk.commits) == (2, before + 1)

    slow_desk.go(act)

    assert slow_desk.call_states() == ["reserved", "reserved"]


def test_a_call_that_was_booked_is_settled_by_the_save_of_its_row(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        await recorder.reserve(calls_of(attempt, 1, 2), budgeted=False)
        put(recorder, attempt, 0)
        await recorder.release(attempt, [])

    desk.go(act)

    assert desk.call_states() == ["settled", "unknown"]


def test_stop_saves_what_is_still_buffered(slow_desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        put(recorder, attempt, 0)

    slow_desk.go(act)

    assert slow_desk.saved() == 1


def test_after_stop_nothing_is_taken_on(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        await asyncio.to_thread(recorder.stop)
        with pytest.raises(DatabaseUnavailable, match="stopping"):
            await recorder.run(lambda conn: None)

    desk.go(act)


# The bounded buffer


def test_senders_wait_while_the_buffer_is_full(desk: Desk) -> None:
    begun, locked = threading.Event(), threading.Event()

    def occupy(_: Connection) -> None:
        begun.set()
        locked.wait(10)

    async def act(recorder: Recorder, attempt: Attempt) -> None:
        occupied = asyncio.ensure_future(recorder.run(occupy))
        await until(begun.is_set)
        put(recorder, attempt, *range(8))
        room = asyncio.ensure_future(recorder.room())
        await asyncio.sleep(0.01)
        waited = not room.done()

        locked.set()
        await room
        await occupied

        assert waited

    desk.options["capacity_rows"] = 8
    desk.go(act)

    assert desk.saved() == 8


def test_there_is_room_at_once_below_the_bound(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        put(recorder, attempt, 0)

        await recorder.room()

    desk.go(act)


# Faults


def refuse(desk: Desk, statement_part: str, value: str, fault: Callable[[], Exception]) -> None:
    """The database refuses statements that carry this value."""

    def check(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        if statement_part in statement and value in repr(parameters):
            raise fault()

    event.listen(desk.database.engine, "before_cursor_execute", check)


def test_a_row_that_the_database_refuses_harms_no_other(desk: Desk) -> None:
    refuse(desk, "INSERT INTO result", "poison", lambda: exc.DataError("", {}, sqlite3.DataError("cannot be stored")))

    async def act(recorder: Recorder, attempt: Attempt) -> None:
        await recorder.reserve(calls_of(attempt, 1, 2, 3), budgeted=False)
        rows = [answered(0), answered(1, output="poison"), answered(2)]
        recorder.put(attempt, rows, [settled(s) for s in (1, 2, 3)])
        await until(lambda: desk.saved() == 3)

    desk.go(act)

    with desk.database.reading() as conn:
        found = conn.execute(select(result.c.status, result.c.error_kind, result.c.output).order_by(result.c.row)).all()
    assert [tuple(r) for r in found] == [
        ("ok", None, "answer 0"),
        ("failed", "unstorable", None),
        ("ok", None, "answer 2"),
    ]
    assert desk.call_states() == ["settled"] * 3
    assert desk.one(select(chunk.c.cost_nanousd)) == 30


def test_a_row_that_the_database_refuses_harms_no_other_when_it_comes_with_the_release(desk: Desk) -> None:
    refuse(desk, "INSERT INTO result", "poison", lambda: exc.DataError("", {}, sqlite3.DataError("cannot be stored")))

    async def act(recorder: Recorder, attempt: Attempt) -> None:
        recorder._gap_s = LONG_S
        with recorder._lock:  # so that all of it is still buffered when the release takes it
            recorder.put(attempt, [answered(0), answered(1, output="poison")], [])
            releasing = asyncio.ensure_future(recorder.release(attempt, []))
            await asyncio.sleep(0)
        await releasing

    desk.go(act)

    assert desk.saved() == 2
    assert desk.one(select(chunk.c.state)) == "done"


@pytest.mark.parametrize("value", [{"usage": Usage(input=10**30)}, {"finish_reason": "\ud800"}])
def test_a_value_that_no_driver_can_send_harms_its_own_row_only(desk: Desk, value: dict[str, Any]) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        await recorder.reserve(calls_of(attempt, 1, 2), budgeted=False)
        ends = [settled(1), replace(settled(2), usage=value.get("usage"))]
        recorder.put(attempt, [answered(0), answered(1, **value)], ends)
        await until(lambda: desk.saved() == 2)

    desk.go(act)

    with desk.database.reading() as conn:
        found = list(conn.execute(select(result.c.status).order_by(result.c.row)).scalars())
    assert found == ["ok", "failed"]
    assert desk.call_states()[0] == "settled"


def test_an_outage_of_the_database_is_waited_out(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmill_workers.recorder._OUTAGE_PATIENCE_S", 0.0)
    away = [True] * 5

    def fault() -> Exception:
        return exc.OperationalError("", {}, sqlite3.OperationalError("database is locked"))

    def check(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool) -> None:
        if "INSERT INTO result" in statement and away:
            away.pop()
            raise fault()

    event.listen(desk.database.engine, "before_cursor_execute", check)

    async def act(recorder: Recorder, attempt: Attempt) -> None:
        put(recorder, attempt, 0, 1)
        await until(lambda: desk.saved() == 2)

    desk.go(act)

    assert away == []


def test_an_errand_that_is_refused_tells_who_awaits_it_and_spares_the_others(desk: Desk) -> None:
    def wrong(conn: Connection) -> None:
        conn.exec_driver_sql("SELECT nothing FROM job")

    async def act(recorder: Recorder, attempt: Attempt) -> None:
        fault, one = await asyncio.gather(
            recorder.run(wrong),
            recorder.run(lambda conn: conn.exec_driver_sql("SELECT 1").scalar()),
            return_exceptions=True,
        )

        assert isinstance(fault, DatabaseError)
        assert one == 1

    desk.go(act)


# Leases


def test_an_attempt_that_lost_its_chunk_is_told_and_its_paid_answer_kept(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        await recorder.run(lambda conn: reaping.expire_leases(conn, worker_ids=["w"]))
        await recorder.run(reaping.reap)
        put(recorder, attempt, 0)
        await until(lambda: attempt.lost)

    desk.go(act)

    assert desk.saved() == 1


def test_rows_that_were_buffered_are_saved_before_the_chunk_is_released(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        put(recorder, attempt, *range(4))
        owned = await recorder.release(attempt, [Child(rows=Rows.span(4, 6), queue=QUEUE, step=0, wait_ms=1000)])

        assert owned

    desk.go(act)

    assert desk.saved() == 4
    assert desk.one(select(chunk.c.state).where(chunk.c.id == 1)) == "done"
    assert desk.one(select(chunk.c.rows).where(chunk.c.parent_id == 1)) == "4-9"


def test_a_release_that_is_repeated_changes_nothing(desk: Desk) -> None:
    async def act(recorder: Recorder, attempt: Attempt) -> None:
        children = [Child(rows=Rows.span(0, 10), queue=QUEUE, step=0)]
        await recorder.release(attempt, children)

        again = await recorder.run(lambda conn: chunks.release(conn, attempt.claim, children))

        assert again

    desk.go(act)

    assert desk.one(select(func.count()).select_from(chunk)) == 2


def test_a_commit_whose_answer_was_lost_is_repeated_without_doubling(desk: Desk) -> None:
    broken = [True]

    def break_once(conn: Connection) -> None:
        if broken and desk.saved_in(conn):
            broken.clear()
            conn.connection.dbapi_connection.commit()  # type: ignore[union-attr]  # it happened, and nobody heard
            raise exc.OperationalError("", {}, sqlite3.OperationalError("database is locked"))

    event.listen(desk.database.engine, "commit", break_once)
    desk.saved_in = lambda conn: conn.execute(select(func.count()).select_from(result)).scalar_one()  # type: ignore[attr-defined]

    async def act(recorder: Recorder, attempt: Attempt) -> None:
        await recorder.reserve(calls_of(attempt, 1), budgeted=False)
        put(recorder, attempt, 0)
        await recorder.release(attempt, [])

    desk.go(act)

    assert not broken
    assert desk.saved() == 1
    assert desk.one(select(chunk.c.n_ok).where(chunk.c.id == 1)) == 1
    assert desk.one(select(chunk.c.cost_nanousd).where(chunk.c.id == 1)) == 10
