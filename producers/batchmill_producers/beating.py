"""Tells the database while a data set is read that its loader lives, however long the source lets it wait."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from batchmill_db import loading
from batchmill_db.session import Database, DatabaseError

log = logging.getLogger(__name__)

BEAT_EVERY_S = 5.0


@contextmanager
def beating(database: Database, job_id: int) -> Iterator[None]:
    """Gives beats for the length of a ``with`` block. One that fails is made up for by the next."""
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(database, job_id, ended), name="loader-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def holder() -> str:
    """Which process reads, for people who look into the database."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _beat(database: Database, job_id: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_EVERY_S):
        try:
            database.run(lambda conn: loading.beat(conn, job_id, holder()), patience_s=1.0)
        except DatabaseError as fault:
            log.debug("loader_beat_failed job=%d error=%s", job_id, fault)
