"""Remembers which ids a data set has had, on disk, so that memory stays flat."""

from __future__ import annotations

import sqlite3
from tempfile import gettempdir
from types import TracebackType

from batchmill_core.errors import SourceError

_CACHE_KIB = 16 * 1024


class SeenIds:
    """Ids with the line each stood on. Lives in an unnamed temporary database, which SQLite deletes when closed."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)
        for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{_CACHE_KIB}"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._connection.execute("BEGIN")

    def add(self, custom_id: str, line: int) -> int | None:
        """None when the id is new, else the line where it stood first. Raises SourceError when the disk is full."""
        try:
            inserted = self._connection.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (custom_id, line)).rowcount
        except sqlite3.Error as error:
            raise SourceError(f"ids cannot be kept in {gettempdir()}: {error}; free space or set TMPDIR") from error
        if inserted:
            return None
        found = self._connection.execute("SELECT line FROM seen WHERE id = ?", (custom_id,)).fetchone()
        return int(found[0])

    def __enter__(self) -> SeenIds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
