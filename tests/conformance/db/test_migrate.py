"""Bringing a database to the schema of this code, by many at once, and refusing any other."""

from __future__ import annotations

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from batchmill_core.errors import SchemaVersionError
from batchmill_db import migrate
from batchmill_db.schema import SCHEMA_VERSION, metadata
from batchmill_db.session import Database
from tests.conformance.db.racers import race, upgrade


def test_six_processes_upgrade_an_empty_database_at_the_same_time(database_url: str) -> None:
    found = race(upgrade, database_url, 6)

    assert sorted(found, key=str) == [*[SCHEMA_VERSION] * 5, None]


def test_the_migrations_make_the_tables_that_the_code_describes(database_url: str) -> None:
    database = Database(database_url)
    migrate.upgrade(database)

    with database.transaction() as conn:
        differences = compare_metadata(MigrationContext.configure(conn), metadata)
        indexes = {i["name"] for t in metadata.tables for i in inspect(conn).get_indexes(t)}
    database.close()

    assert differences == []
    assert {i.name for t in metadata.tables.values() for i in t.indexes} <= indexes


def test_an_upgraded_database_passes_the_check(database_url: str) -> None:
    database = Database(database_url)

    before = migrate.upgrade(database)
    again = migrate.upgrade(database)
    migrate.check(database)
    database.close()

    assert (before, again) == (None, SCHEMA_VERSION)


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (None, "no Batchmill tables yet; run `batchmill db upgrade`"),
        ("0000", f"schema 0000, this Batchmill needs {SCHEMA_VERSION}; run `batchmill db upgrade`"),
        ("9999", "schema 9999, newer than .* upgrade Batchmill on this host"),
    ],
)
def test_the_check_names_the_command_for_a_schema_that_is_not_ours(
    database_url: str, version: str | None, sentence: str
) -> None:
    database = Database(database_url)
    if version is not None:
        migrate.upgrade(database)
        with database.transaction() as conn:
            conn.execute(text("UPDATE alembic_version SET version_num = :v"), {"v": version})

    with pytest.raises(SchemaVersionError, match=sentence):
        migrate.check(database)
    database.close()
