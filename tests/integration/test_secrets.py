"""A provider's key is in no log, no database, no broker and no error, also when the provider itself repeats it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from sqlalchemy import make_url

from batchmill_core.job import JobState
from batchmill_db import telemetry
from batchmill_ops.simulator import SimulatorConfig
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill
from tests.scripted_server import scripted

KEY = "sk-planted-7f3a9c2e51d84b06"
VARIABLE = "PLANTED_KEY"
ROWS = 20
ACCOUNT = {"api_key_env": VARIABLE}


def _traces(mill: Mill) -> Iterator[tuple[str, bytes]]:
    """Everything that a run left behind, by where it lies."""
    for path in mill.home.rglob("*"):
        if path.is_file():
            yield str(path), path.read_bytes()
    yield from _database(mill.database_url)
    with redis.Redis.from_url(mill.settings.broker_url or "") as client:
        for name in client.scan_iter():
            yield f"redis {name!r}", name + (client.dump(name) or b"")


def _database(url: str) -> Iterator[tuple[str, bytes]]:
    """The whole database as text; what SQLite has in its files, compressed or not, is searched as files too."""
    if url.startswith("sqlite"):
        conn = sqlite3.connect(make_url(url).database or "")
        yield "sqlite dump", "\n".join(conn.iterdump()).encode()
        conn.close()
        return
    with psycopg.connect(url.replace("+psycopg", "")) as conn:
        tables = conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        for (table,) in tables:
            rows = conn.execute(f'SELECT t::text FROM "{table}" t').fetchall()  # type: ignore[arg-type]  # its own name
            yield f"table {table}", repr(rows).encode()


def _assert_no_trace(mill: Mill) -> None:
    places = list(_traces(mill))
    found = [place for place, content in places if KEY.encode() in content or KEY[8:].encode() in content]
    assert not found
    assert len(places) > 5


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv(VARIABLE, KEY)
    return {VARIABLE: KEY, "BATCHMILL_LOG_LEVEL": "debug"}


def test_a_key_leaves_no_trace_when_all_goes_well(make_mill: MakeMill, planted: dict[str, str]) -> None:
    mill = make_mill(provider=SimulatorConfig(latency_s=0.02, api_key=KEY), account=ACCOUNT)
    worker = mill.start_worker(env=planted)
    job = mill.submit(ROWS)
    mill.wait_done(job)
    worker.terminate()
    worker.wait_dead()

    assert len(mill.bill()) == ROWS
    _assert_no_trace(mill)


def test_a_key_that_is_refused_and_repeated_by_the_provider_leaves_no_trace(
    make_mill: MakeMill, planted: dict[str, str]
) -> None:
    refusal = {
        "status": 401,
        "headers": {"x-request-id": f"req-{KEY}"},
        "json": {"error": {"message": f"Incorrect API key provided: {KEY}.", "code": "invalid_api_key"}},
    }
    with scripted(refusal) as provider:
        mill = make_mill(provider=provider.base_url, account=ACCOUNT)
        worker = mill.start_worker(env=planted)
        job = mill.submit(ROWS)
        stopped = mill.wait_state(job, JobState.PAUSED)
        worker.terminate()
        worker.wait_dead()

    assert stopped.reason_kind == "account"
    assert provider.requests[0].headers["authorization"] == f"Bearer {KEY}"
    _assert_no_trace(mill)
    with mill.database.reading() as conn:
        assert telemetry.accounts(conn)["sim"].state == "stopped"


def test_a_key_that_a_failing_provider_repeats_leaves_no_trace(make_mill: MakeMill, planted: dict[str, str]) -> None:
    failure = {"status": 400, "json": {"error": {"message": f"bad header Authorization: Bearer {KEY}"}}}
    with scripted(failure) as provider:
        mill = make_mill(provider=provider.base_url, account=ACCOUNT)
        worker = mill.start_worker(env=planted)
        job = mill.submit(ROWS)
        done = mill.wait_done(job)
        worker.terminate()
        worker.wait_dead()

    assert done.by_status["failed"] == ROWS
    _assert_no_trace(mill)


def test_a_broker_password_leaves_no_trace(make_mill: MakeMill, valkey_url: str, tmp_path: Path) -> None:
    secret = "broker-secret-51d84b06"
    with redis.Redis.from_url(valkey_url) as client:
        client.acl_setuser(
            "mill", enabled=True, passwords=[f"+{secret}"], keys=["*"], channels=["*"], commands=["+@all"]
        )
    mill = make_mill(broker_url=valkey_url.replace("redis://", f"redis://mill:{secret}@"))
    worker = mill.start_worker()
    mill.wait_done(mill.submit(ROWS))
    worker.terminate()
    worker.wait_dead()
    with redis.Redis.from_url(valkey_url) as client:
        client.acl_deluser("mill")

    logs = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "batchmill.toml"]
    assert not [p for p in logs if secret.encode() in p.read_bytes()]
