"""Opens the database and the way to the broker that the settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchmill_core.errors import JobError
from batchmill_core.settings import Settings
from batchmill_db import migrate
from batchmill_db.doorbells import Doorbell
from batchmill_db.session import Database

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0


@contextmanager
def opened(settings: Settings, *, make: bool = False) -> Iterator[Database]:
    """The database for the length of a ``with`` block; see `open_database`."""
    database = open_database(settings, make=make)
    try:
        yield database
    finally:
        database.close()


def open_database(settings: Settings, *, make: bool = False) -> Database:
    """The database, with the schema of this code.

    The embedded one is brought up to date by itself, and made where it is not there yet if ``make`` is set. Raises
    JobError when it is not there, SchemaVersionError when a configured one needs `batchmill db upgrade`,
    DatabaseUnavailable when it does not answer.
    """
    own = settings.database_url is None
    if own and make:
        settings.state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif own and not (settings.state_folder / "batchmill.db").exists():
        raise JobError(
            f"there are no jobs in {settings.home} yet; `batchmill run` or `batchmill submit` makes the first"
        )
    database = Database(settings.database_address)
    try:
        database.run(lambda _: None, patience_s=_PATIENCE_S)
        if own:
            migrate.upgrade(database)
        else:
            migrate.check(database)
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def doorbell(settings: Settings, broker_url: str | None = None) -> Iterator[Callable[[Doorbell], None]]:
    """Publishes chunks to the broker. One that cannot be reached is no error: the dispatcher publishes instead."""
    from kombu.exceptions import OperationalError  # Celery takes its time to load; most commands need none

    from batchmill_core.broker import make_bell, publish

    app = make_bell(settings, broker_url=broker_url)
    broken = False

    def ring(bell: Doorbell) -> None:
        nonlocal broken
        if broken:
            return
        try:
            publish(app, bell.chunk_id, bell.queue, bell.label)
        except OperationalError as fault:
            broken = True
            log.warning("not_rung chunk=%d error=%s; workers will find the rows in SQL", bell.chunk_id, fault)

    try:
        yield ring
    finally:
        app.close()
