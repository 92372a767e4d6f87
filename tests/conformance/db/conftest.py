"""One world for each test of this folder, on SQLite and on PostgreSQL. The tables are made once per run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from batchmill_db import migrate
from batchmill_db.schema import metadata
from batchmill_db.session import Database
from tests.conformance.db.world import World
from tests.servers import Postgres


@pytest.fixture(scope="session")
def _migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "batchmill.db"
    database = Database(f"sqlite:///{path}")
    migrate.upgrade(database)
    database.close()
    return path


@pytest.fixture
def migrated_sqlite_url(_migrated_file: Path, tmp_path: Path) -> str:
    return f"sqlite:///{shutil.copy(_migrated_file, tmp_path / 'batchmill.db')}"


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: Postgres) -> Iterator[str]:
    with postgres_server.database() as url:
        database = Database(url)
        migrate.upgrade(database)
        database.close()
        yield url


@pytest.fixture
def migrated_postgres_url(_migrated_postgres: str) -> str:
    database = Database(_migrated_postgres)
    tables = ", ".join(f'"{t.name}"' for t in metadata.sorted_tables)
    with database.transaction() as conn:
        conn.execute(text(f"TRUNCATE {tables} RESTART IDENTITY CASCADE"))
    database.close()
    return _migrated_postgres


@pytest.fixture(params=["migrated_sqlite_url", "migrated_postgres_url"], ids=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest) -> str:
    """A database with the tables and nothing in them."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def world(migrated_url: str) -> Iterator[World]:
    database = Database(migrated_url, pool_size=10)
    yield World(database)
    database.close()
