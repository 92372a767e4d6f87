"""The servers that tests run against are real, empty at first, and end with the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
from sqlalchemy import create_engine, text

from tests.servers import Postgres, Valkey


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_finds_an_empty_broker(valkey_url: str, number: int) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        keys = client.keys()
        client.set("left behind by", number)

    assert keys == []


def test_a_killed_broker_comes_back_on_its_port_with_its_append_only_file(valkey_server: Valkey) -> None:
    with redis.Redis.from_url(valkey_server.url) as client:
        client.set("key", "kept")
    valkey_server.kill()
    valkey_server.start()

    with redis.Redis.from_url(valkey_server.url) as client:
        assert client.get("key") == b"kept"


@pytest.mark.parametrize("number", [1, 2])
def test_each_test_finds_an_empty_database(database_url: str, number: int) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE left_behind (number INTEGER)"))
        connection.execute(text("INSERT INTO left_behind VALUES (:number)"), {"number": number})
        rows = connection.execute(text("SELECT number FROM left_behind")).scalars().all()
    engine.dispose()

    assert rows == [number]


def test_a_database_is_dropped_although_somebody_is_connected(postgres_server: Postgres) -> None:
    with postgres_server.database() as url:
        engine = create_engine(url)
        connection = engine.connect()
        connection.execute(text("SELECT 1"))

    connection.invalidate()
    engine.dispose()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its killed parent")
def test_a_server_dies_with_a_killed_test_run(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from tests.servers import Valkey; server = Valkey(pathlib.Path(sys.argv[1]));"
        "server.start(); print(server.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        os.kill(run.pid, 9)

    gone, _ = psutil.wait_procs([server], timeout=10)
    assert gone == [server]
