"""Bringing a database to the schema of this code, safely when many processes start at once."""

from __future__ import annotations

import logging
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from batchmill_core.errors import SchemaVersionError

from .schema import SCHEMA_VERSION
from .session import Database

logging.getLogger("alembic").setLevel(logging.WARNING)
_LOCK = 0x6261746368  # "batch", an arbitrary key for PostgreSQL's advisory lock


def upgrade(database: Database) -> str | None:
    """Runs the missing migrations in one transaction; answers the version it found (None: empty database).

    Idempotent. On PostgreSQL an advisory lock, on SQLite the write lock lets one process migrate while others wait.
    """
    return database.run(_upgrade)


def _upgrade(conn: Connection) -> str | None:
    if conn.dialect.name == "postgresql":
        conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    before = _revision(conn)
    if before != SCHEMA_VERSION:
        from alembic import command  # takes a fifth of a second to import, which most commands need not pay
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        config.attributes["connection"] = conn
        command.upgrade(config, "head")
    return before


def version(database: Database) -> str | None:
    """The version of the schema that the database has; None when it has none."""
    with database.reading() as conn:
        return _revision(conn)


def _revision(conn: Connection) -> str | None:
    """What Alembic wrote into its own table."""
    if not inspect(conn).has_table("alembic_version"):
        return None
    found: str | None = conn.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return found


def check(database: Database) -> None:
    """Raises SchemaVersionError, naming the command, unless the database has the schema of this code."""
    found = version(database)
    if found == SCHEMA_VERSION:
        return
    if found is None:
        raise SchemaVersionError("the database has no Batchmill tables yet; run `batchmill db upgrade`")
    if found < SCHEMA_VERSION:
        raise SchemaVersionError(
            f"the database has schema {found}, this Batchmill needs {SCHEMA_VERSION}; run `batchmill db upgrade`"
        )
    raise SchemaVersionError(
        f"the database has schema {found}, newer than {SCHEMA_VERSION} of this Batchmill; upgrade Batchmill on this host"
    )
