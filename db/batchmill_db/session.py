"""Connections to SQLite or PostgreSQL, the database's clock, and transactions that retry what is transient."""

from __future__ import annotations

import logging
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Integer, create_engine, event, exc, make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from batchmill_core.errors import BatchmillError, ConfigurationError

__all__ = ["Connection", "Database", "DatabaseError", "DatabaseUnavailable", "is_transient", "now_ms"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_BUSY_TIMEOUT_MS = 10_000
# Serialization failure, deadlock, lock not available, shutdown, crash, starting up, too many connections, disk full,
# out of memory: https://www.postgresql.org/docs/current/errcodes-appendix.html
_TRANSIENT_SQLSTATES = frozenset({"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "53300", "53100", "53200"})
_FILE_GONE = "the database file was deleted or moved away"
_TRANSIENT_WORDS = ("locked", "busy", "disk is full", "disk I/O error", _FILE_GONE)
_NO_TABLE = "42P01"  # undefined_table, PostgreSQL's word for SQLite's "no such table"


class DatabaseError(BatchmillError):
    """The database refused a statement; trying the same again will not help."""


class DatabaseUnavailable(DatabaseError):
    """The database did not answer, or was locked, for as long as the caller had patience."""


class now_ms(FunctionElement[int]):  # noqa: N801  # reads as a SQL function
    """Milliseconds since 1970 by the database's own clock, which moves within a transaction."""

    type = Integer()
    inherit_cache = True


@compiles(now_ms, "sqlite")
def _now_sqlite(element: Any, compiler: Any, **kw: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)"


@compiles(now_ms, "postgresql")
def _now_postgresql(element: Any, compiler: Any, **kw: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


class Database:
    """One database, opened lazily. ``url`` is ``sqlite:///path`` or ``postgresql+psycopg://…``.

    A Database belongs to the process that made it. ``pool_size`` is how many threads of this process use it at once.
    """

    def __init__(self, url: str, *, pool_size: int = 5) -> None:
        self.url = make_url(url)
        self.dialect = self.url.get_backend_name()
        if self.dialect not in ("sqlite", "postgresql"):
            raise ConfigurationError(
                f"database_url is of kind {self.dialect!r}; use sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME"
            )
        self._engine = _sqlite(url, pool_size) if self.dialect == "sqlite" else _postgresql(url, pool_size)

    @property
    def address(self) -> str:
        """The URL without its password."""
        return self.url.render_as_string(hide_password=True)

    @property
    def engine(self) -> Engine:
        return self._engine

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One transaction that may write; commits when the block ends, rolls back when it raises."""
        with self._engine.begin() as conn:
            yield conn

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads: on SQLite it takes no write lock.

        Raises DatabaseUnavailable when the database does not answer, DatabaseError for any other fault of it.
        """
        try:
            with self._engine.connect().execution_options(batchmill_read=True) as conn:
                yield conn
        except exc.DBAPIError as fault:
            raise self._translated(fault) from fault

    def run(self, work: Callable[[Connection], T], *, patience_s: float = 30.0, waits_for_space: bool = True) -> T:
        """Runs ``work`` in a transaction; repeats it with jitter for up to ``patience_s`` on transient faults.

        Transient: SQLite busy, serialization failure, deadlock, a lost or refused connection, a full disk. After a lost
        connection the outcome of the commit is unknown, so ``work`` has to be idempotent. Without ``waits_for_space`` a
        full disk is told at once, to somebody who can make room. Raises DatabaseUnavailable when time is up,
        DatabaseError for what no repeat can heal.
        """
        deadline = time.monotonic() + patience_s
        delay = 0.02
        level = logging.WARNING  # told once: the repeats say nothing new
        while True:
            try:
                with self.transaction() as conn:
                    return work(conn)
            except exc.DBAPIError as fault:
                hopeless = not is_transient(fault) or (_is_full(fault) and not waits_for_space)
                if hopeless or time.monotonic() + delay > deadline:
                    raise self._translated(fault) from fault
                log.log(level, "database_retry up_to_s=%.0f error=%s", patience_s, _first_line(fault))
                level = logging.DEBUG
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, 2.0)

    def _translated(self, fault: exc.DBAPIError) -> DatabaseError:
        if _is_full(fault):
            return DatabaseUnavailable(
                f"the disk of the database at {self.address} is full ({_first_line(fault)}); make room, then try again"
            )
        if is_transient(fault):
            return DatabaseUnavailable(f"the database at {self.address} does not answer: {_first_line(fault)}")
        if _has_no_tables(fault):
            return DatabaseUnavailable(
                f"the database at {self.address} has lost its tables ({_first_line(fault)}): it was deleted or replaced; "
                "put it back, or start anew with `batchmill db upgrade`"
            )
        if "unable to open database file" in str(fault.orig):
            return DatabaseError(
                f"the database at {self.address} cannot be opened: {_first_line(fault)}; does its folder exist?"
            )
        if "readonly database" in str(fault.orig):
            return DatabaseError(
                f"the database at {self.address} may only be read by you ({_first_line(fault)}); "
                "it and its folder have to be writable"
            )
        return DatabaseError(f"the database refused a statement: {_first_line(fault)}")

    def read(self, work: Callable[[Connection], T]) -> T:
        """Runs ``work``, which only reads, once; see `reading`."""
        with self.reading() as conn:
            return work(conn)

    def close(self) -> None:
        self._engine.dispose()


def _is_full(fault: exc.DBAPIError) -> bool:
    """Whether the database has no room left: `SQLITE_FULL <https://www.sqlite.org/rescode.html#full>`_, SQLSTATE 53100."""
    return "disk is full" in str(fault.orig) or getattr(fault.orig, "sqlstate", None) == "53100"


def is_transient(fault: exc.DBAPIError) -> bool:
    """Whether the same transaction may succeed when tried again."""
    if fault.connection_invalidated:
        return True
    original = fault.orig
    if isinstance(original, sqlite3.OperationalError):
        return any(word in str(original) for word in _TRANSIENT_WORDS)
    state = getattr(original, "sqlstate", None)
    return state in _TRANSIENT_SQLSTATES or (isinstance(fault, exc.OperationalError) and state is None)


def _has_no_tables(fault: exc.DBAPIError) -> bool:
    return "no such table" in str(fault.orig) or getattr(fault.orig, "sqlstate", None) == _NO_TABLE


def _first_line(fault: exc.DBAPIError) -> str:
    return str(fault.orig).strip().splitlines()[0] if str(fault.orig).strip() else type(fault.orig).__name__


def _sqlite(url: str, pool_size: int) -> Engine:
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=10,
        connect_args={"check_same_thread": False, "timeout": _BUSY_TIMEOUT_MS / 1000, "cached_statements": 256},
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")  # NORMAL can lose the last commits at a power cut
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA cache_size=-16000")
        cursor.close()

    path = engine.url.database

    seen: set[tuple[int, int]] = set()

    @event.listens_for(engine, "do_connect")
    def _not_anew(_dialect: Any, _record: Any, _arguments: Any, _named: Any) -> None:
        if seen and _file_id(path) is None:  # SQLite would make an empty one in its place
            raise sqlite3.OperationalError(_FILE_GONE)

    @event.listens_for(engine, "connect")
    def _note_file(_connection: Any, record: Any) -> None:
        record.info["file"] = found = _file_id(path)
        if found is not None:
            seen.add(found)

    @event.listens_for(engine, "checkout")
    def _same_file(_connection: Any, record: Any, _proxy: Any) -> None:
        # A connection outlives its deleted file, and what it commits there is lost to everybody.
        if record.info["file"] != _file_id(path):
            raise exc.DisconnectionError(_FILE_GONE)

    @event.listens_for(engine, "begin")
    def _begin(conn: Connection) -> None:
        # A read transaction that turns into a writing one fails at once when another writes, whatever the timeout.
        reads = conn.get_execution_options().get("batchmill_read", False)
        conn.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _file_id(path: str | None) -> tuple[int, int] | None:
    """Which file is there now; None for a database in memory, and where there is none."""
    if not path or path == ":memory:":
        return None
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _postgresql(url: str, pool_size: int) -> Engine:
    try:
        return create_engine(
            url,
            pool_size=pool_size,
            max_overflow=10,
            pool_pre_ping=True,
            pool_recycle=1800,
            connect_args={
                "connect_timeout": 10,
                "application_name": "batchmill",
                "client_encoding": "utf8",  # else a database made as SQL_ASCII answers bytes
                "options": "-c statement_timeout=60000 -c idle_in_transaction_session_timeout=60000",
            },
        )
    except ModuleNotFoundError as missing:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'batchmill[postgres]'") from missing
