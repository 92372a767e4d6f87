"""Fixtures that all tests share. Servers start when the first test asks for them, once per run."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Postgres, Valkey


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATCHMILL_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Celery's worker in a test's own process sets the root logger's level, and later tests would hear nothing."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def _valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def valkey_url(_valkey: Valkey) -> str:
    """An empty Valkey server of this test run."""
    _valkey.flush()
    return _valkey.url


@pytest.fixture
def valkey_server(tmp_path: Path) -> Iterator[Valkey]:
    """A server of this test's own, with an append-only file, to kill, freeze or start again."""
    server = Valkey(tmp_path, appendonly=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """The PostgreSQL server of this test run, in which each test that asks gets a database of its own."""
    # Not under pytest's folders: those are closed to the user that PostgreSQL runs as when the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="batchmill-postgres-"))
    server = Postgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """A new, empty PostgreSQL database."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'batchmill.db'}"


@pytest.fixture(params=["sqlite_url", "postgres_url"], ids=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database, once of each kind. A machine without PostgreSQL fails here: nothing is skipped."""
    url: str = request.getfixturevalue(request.param)
    return url
