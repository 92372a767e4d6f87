"""One statement for many rows, compiled once per kind of database and run without SQLAlchemy's work per row.

Saving and booking run for every row of every job. Measured on SQLite with 128 rows of 27 columns: 39 µs of CPU per row
through ``Connection.execute``, 20 µs through here, the same SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ClauseElement


def insert_for(dialect: str) -> Callable[..., Any]:
    """The ``insert`` that knows ON CONFLICT in this dialect."""
    return sqlite.insert if dialect == "sqlite" else postgresql.insert


class Bulk:
    """A writing statement with its parameters' names. ``build`` makes it from the name of a dialect.

    Values must be what the driver stores as it is: int, str, bytes, bool or None.
    """

    def __init__(self, names: Sequence[str], build: Callable[[str], Executable]) -> None:
        self.names = tuple(names)
        self._build = build
        self._compiled: dict[str, tuple[str, tuple[int, ...] | None]] = {}
        self._split: dict[str, tuple[str, str, str] | None] = {}

    def run(self, conn: Connection, rows: Sequence[tuple[Any, ...]]) -> int:
        """Runs the statement for each tuple of values, in the order of ``names``; answers how many rows changed."""
        if not rows:
            return 0
        sql, order = self._sql(conn)
        if order is None:
            return conn.exec_driver_sql(sql, [dict(zip(self.names, r, strict=True)) for r in rows]).rowcount
        if order != tuple(range(len(self.names))):
            rows = [tuple([r[i] for i in order]) for r in rows]
        if (parts := self._parts(sql)) is None:
            return conn.exec_driver_sql(sql, list(rows)).rowcount
        return sum(_insert_block(conn, parts, block) for block in _blocks(rows))

    def _parts(self, sql: str) -> tuple[str, str, str] | None:
        """An INSERT's text before, of and after its one group of values; None for any other statement."""
        if sql not in self._split:
            self._split[sql] = _split_values(sql)
        return self._split[sql]

    def _sql(self, conn: Connection) -> tuple[str, tuple[int, ...] | None]:
        name = conn.dialect.name
        if name not in self._compiled:
            statement = self._build(name)
            assert isinstance(statement, ClauseElement)
            compiled = statement.compile(dialect=conn.dialect, column_keys=list(self.names))
            assert isinstance(compiled, SQLCompiler)
            positions = compiled.positiontup
            order = None if positions is None else tuple(self.names.index(p) for p in positions)
            self._compiled[name] = (compiled.string, order)
        return self._compiled[name]


# Python's sqlite3 gives up the interpreter lock at each step of a statement and has to win it back from a busy event
# loop: measured with one, 128 rows took 119 ms as 128 steps and 41 ms as one. Few sizes, so that SQLite's statements are
# prepared once.
_BLOCK_ROWS = (64, 16, 4, 1)


def _blocks(rows: Sequence[tuple[Any, ...]]) -> Iterator[Sequence[tuple[Any, ...]]]:
    at = 0
    for size in _BLOCK_ROWS:
        while len(rows) - at >= size:
            yield rows[at : at + size]
            at += size


def _insert_block(conn: Connection, parts: tuple[str, str, str], rows: Sequence[tuple[Any, ...]]) -> int:
    before, group, after = parts
    sql = f"{before}{', '.join([group] * len(rows))}{after}"
    return conn.exec_driver_sql(sql, tuple(chain.from_iterable(rows))).rowcount


def _split_values(sql: str) -> tuple[str, str, str] | None:
    if not sql.startswith("INSERT"):
        return None
    start = sql.index(" VALUES (") + len(" VALUES ")
    depth = 0
    for end in range(start, len(sql)):
        depth += {"(": 1, ")": -1}.get(sql[end], 0)
        if depth == 0:
            return sql[:start], sql[start : end + 1], sql[end + 1 :]
    return None
