"""What the shell offers at TAB beyond commands and options: models, accounts, jobs, statuses, columns.

A completion that fails offers nothing: whatever is wrong is told when the command runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from batchmill_core.errors import BatchmillError
from batchmill_core.request import RowStatus
from batchmill_core.settings import Settings, load_settings

if TYPE_CHECKING:
    from batchmill_db.jobs import JobRecord

_JOBS = 50


def _with_settings(offer: Callable[[Settings, str], list[str]]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # a warning would land between what somebody types
        try:
            return offer(load_settings(), incomplete)
        except (BatchmillError, OSError):
            return []
        finally:
            logging.disable(before)

    complete.__name__, complete.__doc__ = offer.__name__, offer.__doc__
    return complete


@_with_settings
def model_names(settings: Settings, incomplete: str) -> list[str]:
    """Models of batchmill.toml."""
    return _beginning(incomplete, settings.catalog.models)


@_with_settings
def local_model_names(settings: Settings, incomplete: str) -> list[str]:
    """Models that an engine serves."""
    return _beginning(incomplete, [m.name for m in settings.catalog.models.values() if m.engine is not None])


@_with_settings
def account_names(settings: Settings, incomplete: str) -> list[str]:
    """Accounts of batchmill.toml, several of them with commas between."""
    return _listed(incomplete, settings.catalog.accounts)


@_with_settings
def job_references(settings: Settings, incomplete: str) -> list[str]:
    """Names and ids of the newest jobs, names first."""
    if settings.database_url is None and not (settings.state_folder / "batchmill.db").exists():
        return []
    records = _newest(settings)
    return _beginning(incomplete, dict.fromkeys([*(r.name for r in records), *(r.public_id for r in records)]))


def statuses(incomplete: str) -> list[str]:
    """Row statuses, several of them with commas between."""
    return _listed(incomplete, [s.value for s in RowStatus])


def columns(incomplete: str) -> list[str]:
    """Result columns, several of them with commas between."""
    from batchmill_producers.export_rows import COLUMNS

    return _listed(incomplete, COLUMNS)


def _newest(settings: Settings) -> list[JobRecord]:
    from batchmill_db import jobs
    from batchmill_db.session import Database

    database = Database(settings.database_address, pool_size=1)
    try:
        return database.read(lambda conn: jobs.newest(conn, limit=_JOBS))
    finally:
        database.close()


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _listed(incomplete: str, words: Iterable[str]) -> list[str]:
    """The words that may come next in a list with commas, each with what stands before it."""
    before, comma, last = incomplete.rpartition(",")
    taken = set(before.split(","))
    return [f"{before}{comma}{word}" for word in words if word.startswith(last) and word not in taken]
