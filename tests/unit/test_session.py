"""Sessions: what a database that is gone, moved or emptied is taken for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, text

from batchmill_db import migrate, telemetry
from batchmill_db.session import Connection, Database, DatabaseError, DatabaseUnavailable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "batchmill.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{path}")
    migrate.upgrade(database)
    yield database
    database.close()


def write(conn: Connection) -> None:
    telemetry.stop_account(conn, "sim", kind="unauthorized", reason="no key", probe_after_ms=1)


def test_a_file_that_was_moved_away_is_an_outage_and_no_empty_one_takes_its_place(
    database: Database, path: Path, tmp_path: Path
) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    for file in tmp_path.glob("batchmill.db*"):
        file.rename(aside / file.name)

    with pytest.raises(DatabaseUnavailable, match="deleted or moved away"):
        database.run(write, patience_s=0.1)
    assert not path.exists()
    for file in aside.iterdir():
        file.rename(tmp_path / file.name)
    database.run(write)
    assert database.read(lambda conn: conn.execute(text("SELECT name FROM account")).scalars().all()) == ["sim"]


def test_a_file_that_was_replaced_by_another_is_read_not_the_one_that_is_gone(
    database: Database, path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.db"
    fresh = Database(f"sqlite:///{other}")
    migrate.upgrade(fresh)
    fresh.run(write)
    fresh.close()
    for file in tmp_path.glob("batchmill.db*"):
        file.unlink()
    other.replace(path)

    assert database.read(lambda conn: conn.execute(text("SELECT name FROM account")).scalars().all()) == ["sim"]


def test_an_emptied_database_is_an_outage_that_says_what_to_do(database: Database) -> None:
    with database.transaction() as conn:
        conn.execute(text("DROP TABLE account"))

    with pytest.raises(DatabaseUnavailable, match=r"has lost its tables .*batchmill db upgrade"):
        database.run(write, patience_s=0.1)


def test_a_statement_that_is_wrong_is_refused_and_not_tried_again(database: Database) -> None:
    tries = 0

    def wrong(conn: Connection) -> None:
        nonlocal tries
        tries += 1
        conn.execute(text("SELECT nothing FROM job"))

    with pytest.raises(DatabaseError, match="refused a statement") as fault:
        database.run(wrong)
    assert not isinstance(fault.value, DatabaseUnavailable)
    assert tries == 1


def disk_full(database: Database) -> None:
    """Makes the database as large as it may be, as a disk without room would."""
    pages = database.read(lambda conn: conn.execute(text("PRAGMA page_count")).scalar_one())
    database.close()
    event.listen(database.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages}"))


def fill(conn: Connection) -> None:
    conn.execute(text("UPDATE account SET reason = hex(randomblob(100000))"))


def test_a_full_disk_is_told_at_once_to_who_can_make_room(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    database.run(write)
    disk_full(database)

    with pytest.raises(DatabaseUnavailable, match=r"the disk of the database at sqlite:.* is full .*; make room"):
        database.run(fill, waits_for_space=False)
    assert caplog.messages == []


def test_a_full_disk_is_waited_for_otherwise_and_told_once(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    database.run(write)
    disk_full(database)

    with pytest.raises(DatabaseUnavailable, match="is full"):
        database.run(fill, patience_s=0.5)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "database_retry" in caplog.messages[0]
