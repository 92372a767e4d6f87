"""Whether this login may write: a database that may only be read answers every question, and saves no row."""

from __future__ import annotations

from sqlalchemy import Connection, func, select


def may_write(conn: Connection) -> bool:
    """False on a PostgreSQL standby, or where `default_transaction_read_only` is on. SQLite says so by an error.

    Reads only. See https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-DEFAULT-TRANSACTION-READ-ONLY
    """
    if conn.dialect.name != "postgresql":
        return True
    return bool(conn.execute(select(func.current_setting("transaction_read_only"))).scalar_one() == "off")
