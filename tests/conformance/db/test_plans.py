"""The hot statements are served by indexes: each is run, and what was sent to the database is explained."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import Connection, event, text

from batchmill_core.job import Rows
from batchmill_core.request import RowStatus
from batchmill_db import (
    booking,
    chunks,
    counters,
    doorbells,
    merging,
    migrate,
    past_calls,
    payload_store,
    reaping,
    results,
    rounds,
    saved_results,
    steering,
)
from batchmill_db.chunks import Claim
from batchmill_db.session import Database
from tests.conformance.db.world import QUEUE, World, answered, call_of, settled
from tests.servers import Postgres

MANY = 20_000
BIG = ("chunk", "result", "call", "payload")


class Full(NamedTuple):
    """A database with a job of many chunks, half of them ready, and a paused one with as many."""

    database: Database
    claim: Claim


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def full(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _migrated_file: Path
) -> Iterator[Full]:
    if request.param == "sqlite":
        path = shutil.copy(_migrated_file, tmp_path_factory.mktemp("full") / "batchmill.db")
        yield from _full(f"sqlite:///{path}")
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    with server.database() as url:
        yield from _full(url)


def _full(url: str) -> Iterator[Full]:
    database = Database(url)
    migrate.upgrade(database)
    world = World(database)
    paused, job_id = world.job(sizes=(2,)), world.job(sizes=(2,))
    with database.transaction() as conn:
        steering.pause(conn, paused, kind="user", reason="lunch")
    claim = world.take(job_id)
    world.reserve(claim, [1, 2])
    with database.transaction() as conn:
        _fill(conn, paused, job_id, claim)
    if database.dialect == "postgresql":  # which does so by itself sooner or later; SQLite plans without figures
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.execute(text("VACUUM ANALYZE"))
    yield Full(database, claim)
    database.close()


def _fill(conn: Connection, paused: int, job_id: int, claim: Claim) -> None:
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < {MANY}) "
    chunk = "INSERT INTO chunk (job_id, rows, first_row, n_rows, queue, contract, state, created_ms) SELECT "
    columns = f"CAST(i AS TEXT), i, 1, '{QUEUE}', 1, CASE WHEN i % 2 = 0 THEN 'done' ELSE 'ready' END, 1 FROM n"
    for owner in (paused, job_id):
        conn.execute(text(f"{numbers}{chunk}{owner}, {columns}"))
        conn.execute(
            text(
                f"{numbers}INSERT INTO payload (job_id, first_row, n_rows, requests, inputs, digest) "
                f"SELECT {owner}, i, 1, '', '', '' FROM n"
            )
        )
    conn.execute(
        text(
            f'{numbers}INSERT INTO result (job_id, "row", round, status, chunk_id, fence, saved_ms) '
            f"SELECT {job_id}, i, 1, CASE WHEN i % 1000 = 0 THEN 'failed' ELSE 'ok' END, 1, 1, 1 FROM n"
        )
    )
    conn.execute(
        text(
            f"{numbers}INSERT INTO call (chunk_id, fence, seq, job_id, round, first_row, last_row, state, model, worker,"
            f" reserved_ms) SELECT 9, 1, i, {job_id}, 1, i, i, 'settled', 'm', 'w', 1 FROM n"
        )
    )


def plans(full: Full, act: Callable[[Connection], object]) -> list[str]:
    """The plans of the statements that ``act`` sends, which is undone."""
    sent: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        sent.append((statement, parameters[0] if many else parameters))

    with full.database.engine.connect() as conn:
        event.listen(conn, "before_cursor_execute", note)
        act(conn)
        event.remove(conn, "before_cursor_execute", note)
        found = [_explain(conn, full.database.dialect, s, p) for s, p in sent if not s.startswith("BEGIN")]
        conn.rollback()
    return found


def _explain(conn: Connection, dialect: str, statement: str, parameters: Any) -> str:
    raw: Any = conn.connection.driver_connection
    if dialect == "sqlite":
        return "\n".join(r[3] for r in raw.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))
    with psycopg.ClientCursor(raw) as cursor:
        cursor.execute(
            "SET LOCAL enable_seqscan = off"
        )  # what still reads a whole table then, has no index to serve it
        cursor.execute(f"EXPLAIN {statement}", parameters)
        return "\n".join(r[0] for r in cursor)


def full_scans(plan: str) -> list[str]:
    """Lines that read a whole big table. Reading a whole partial index is fine: it is small."""
    lines = [line.strip() for line in plan.splitlines()]
    sqlite = [f"SCAN {t}" for t in BIG]
    return [line for line in lines if line in sqlite or any(f"Seq Scan on {t} " in line for t in BIG)]


def _claim(conn: Connection, full: Full) -> object:
    return chunks.claim(conn, full.claim.chunk_id + 1, "w2", lease_ms=1)


def _save(conn: Connection, full: Full) -> object:
    rows = [answered(n, n + 1) for n in (0, 1)]
    work = results.Save(claim=full.claim, seq=1, results=rows, ends=[settled(1), settled(2)], releases=True)
    return results.save(conn, work)


def _reserve(conn: Connection, full: Full) -> object:
    return booking.reserve(conn, [call_of(full.claim, 3, Rows.of([1]))], budgeted=True)


SCATTERED = Rows.of(range(10, 15_000, 1000))
_OF = {"between": Rows.span(5000, 100), "scattered": SCATTERED}

HOT: dict[str, tuple[Callable[[Connection, Full], object], str]] = {
    "claim": (_claim, "chunk"),
    "heartbeat": (lambda c, f: chunks.heartbeat(c, {f.claim.chunk_id: f.claim.fence}, lease_ms=1), "chunk"),
    "ring": (lambda c, f: doorbells.ring(c, windows={QUEUE: 4}, again_after_ms=1000), "chunk_ready"),
    "overdue": (lambda c, f: doorbells.overdue(c, [QUEUE], waited_ms=1000), "chunk_ready"),
    "outstanding": (lambda c, f: doorbells.ring(c, windows={QUEUE: 4}, again_after_ms=1000), "chunk_rung"),
    "queues with work": (lambda c, f: doorbells.queues_with_work(c), "chunk_"),
    "merge": (lambda c, f: merging.merge(c), "chunk_derived"),
    "reap": (lambda c, f: reaping.reap(c), "chunk_leased"),
    "expire": (lambda c, f: reaping.expire_leases(c, worker_ids=["w9"]), "chunk_leased"),
    "sum": (lambda c, f: counters.sum_counters(c), "chunk_unsummed"),
    "finish": (lambda c, f: steering.finish(c), "chunk_"),
    "save": (_save, "chunk"),
    "reserve": (_reserve, "call"),
    "finished": (lambda c, f: saved_results.finished(c, f.claim.job_id, _OF["between"], 1), "result"),
    "finished, scattered": (lambda c, f: saved_results.finished(c, f.claim.job_id, SCATTERED, 1), "result"),
    "earlier": (lambda c, f: saved_results.earlier(c, f.claim.job_id, _OF["between"], 2), "result"),
    "past": (lambda c, f: past_calls.past_of(c, f.claim.job_id, _OF["between"], 1), "call_by_row"),
    "past of shared calls": (lambda c, f: past_calls.past_of(c, f.claim.job_id, SCATTERED, 1), "call_of_many_rows"),
    "reserved calls": (lambda c, f: steering.reserved_calls(c, f.claim.job_id), "call_reserved"),
    "requests": (lambda c, f: payload_store.requests_of(c, f.claim.job_id, _OF["between"]), "payload"),
    "inputs": (lambda c, f: payload_store.inputs_after(c, f.claim.job_id, 9000), "payload"),
    "export": (lambda c, f: saved_results.between(c, f.claim.job_id, 5000, 5999), "result"),
    "errors": (lambda c, f: saved_results.errors_by_kind(c, f.claim.job_id), "result_not_ok"),
    "rows to retry": (lambda c, f: rounds.rows_of_status(c, f.claim.job_id, [RowStatus.FAILED]), "result_not_ok"),
}


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_is_served_by_an_index(full: Full, name: str) -> None:
    act, index = HOT[name]

    found = plans(full, lambda conn: act(conn, full))

    assert found
    assert [line for plan in found for line in full_scans(plan)] == []
    assert any(index in plan for plan in found), found


def test_a_full_scan_is_seen(full: Full) -> None:
    found = plans(full, lambda conn: conn.execute(text("SELECT count(*) FROM chunk WHERE last_error = 'x'")))

    assert len(full_scans(found[0])) == 1
