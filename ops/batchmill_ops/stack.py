"""The embedded stack of a folder as its users see it: started by the first, shared by all, ended by the last."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace

from batchmill_core.errors import ConfigurationError, JobStopped
from batchmill_core.settings import Settings
from batchmill_db import migrate
from batchmill_db.session import Database, DatabaseError, DatabaseUnavailable

from .stack_folder import LockTaken, StackFolder, exclusive
from .stack_hold import Hold, status, take_hold
from .stack_link import LinkLost, Message

__all__ = ["Stack", "attach", "is_running"]

log = logging.getLogger(__name__)

_KILL_AFTER_S = 10.0
_DATABASE_WAIT_S = 10.0
_MIGRATE_WAIT_S = 60.0


class Stack:
    """One user's hold. With a configured broker there is nothing to hold: servers and workers are the user's own."""

    def __init__(self, settings: Settings, database: Database, hold: Hold | None) -> None:
        self.database = database
        self._configured = settings
        self._folder = StackFolder(path=settings.state_folder)
        self._hold = hold
        self._queues: tuple[str, ...] = ()
        self._broker_url = settings.broker_url or (hold.broker_url if hold else "")

    @property
    def settings(self) -> Settings:
        """The settings with the broker's URL filled in."""
        return replace(self._configured, broker_url=self._broker_url)

    @property
    def broker_url(self) -> str:
        """Where the broker listens; holds the embedded one's password."""
        return self._broker_url

    def serve(self, queues: Iterable[str]) -> None:
        """Makes sure that workers for these queues run here. Idempotent: each queue's are started once per stack.

        What cannot be started is told by ``unfit``. Does nothing with a configured broker.
        """
        self._queues = tuple(dict.fromkeys([*self._queues, *queues]))
        self._ask(self._wish())

    def _wish(self) -> Message:
        catalog = self._configured.catalog
        names = {account.api_key_env for account in catalog.accounts.values() if account.api_key_env is not None}
        # From memory to memory: this user's shell may hold keys that the one of the stack's first user does not.
        return {"op": "serve", "queues": self._queues, "keys": {n: os.environ[n] for n in names & os.environ.keys()}}

    def unfit(self) -> list[str]:
        """Why workers of this stack could not start, one sentence each."""
        return [str(reason) for reason in self._ask({"op": "status"}).get("unfit", [])]

    def _ask(self, message: Message) -> Message:
        """Asks the stack's process; one that died is first started again, over the same files.

        Raises JobStopped when somebody stopped it: that is to stand.
        """
        if self._hold is None:
            return {}
        try:
            return self._hold.ask(message)
        except LinkLost as lost:
            if not self._folder.state_file.exists():  # it is left by a crash only
                raise JobStopped(
                    f"the embedded stack of {self._folder.path} was stopped; go on with `batchmill resume JOB`"
                ) from lost
            log.warning("stack_lost reason=%s; starting it again", lost)
        self._hold.close()
        self._hold = take_hold(self._configured, self._folder)
        self._broker_url = self._hold.broker_url
        if self._queues:
            self._hold.ask(self._wish())
        return self._hold.ask(message)

    def stop(self, *, grace_s: float | None = None) -> None:
        """Leaves. When this was the last user, workers drain, are killed after ``grace_s`` (default: ``drain_s`` and
        10 s), Valkey stops, and no process is left when this returns. Idempotent.
        """
        if self._hold is not None:
            self._hold.leave(grace_s=self._configured.drain_s + _KILL_AFTER_S if grace_s is None else grace_s)
            self._let_go()
        self.database.close()

    def kill(self) -> None:
        """Leaves at once: when this was the last user, workers are killed. Also ends a ``stop`` that was interrupted."""
        if self._hold is not None:
            self._hold.hurry(self._folder)
            self._let_go()
        self.database.close()

    def _let_go(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()


def attach(settings: Settings) -> Stack:
    """Becomes a user of the folder's stack, which is started if none runs; or of the configured broker.

    The embedded database is brought to this code's schema; a configured one is only checked. Raises ConfigurationError
    when the folder, the server or the database cannot be used (SchemaVersionError names the command to run).
    """
    database = Database(settings.database_address)
    try:
        folder = StackFolder(path=settings.state_folder)
        if settings.embedded or settings.database_url is None:
            folder.prepare()
        _answer_for(database)
        if not settings.embedded:
            migrate.check(database)
            return Stack(settings, database, None)
        _ready_database(settings, database, folder)
        return Stack(settings, database, take_hold(settings, folder))
    except BaseException:
        database.close()
        raise


def _answer_for(database: Database) -> None:
    try:
        database.run(lambda conn: None, patience_s=_DATABASE_WAIT_S)
    except DatabaseUnavailable as fault:
        raise ConfigurationError(str(fault)) from fault  # nothing is wrong with the address
    except DatabaseError as fault:
        raise ConfigurationError(
            f"the database {database.address} cannot be used: {fault}; correct database_url, or move the file away"
        ) from fault


def _ready_database(settings: Settings, database: Database, folder: StackFolder) -> None:
    if settings.database_url is not None:
        migrate.check(database)
        return
    try:
        with exclusive(folder.starting_lock, wait_s=_MIGRATE_WAIT_S):
            migrate.upgrade(database)
            migrate.check(database)
    except LockTaken as fault:
        raise ConfigurationError(
            f"another process has held {fault} for {_MIGRATE_WAIT_S:.0f} s; end it and try again"
        ) from fault


def is_running(settings: Settings) -> bool:
    """Whether a stack runs in the folder. Joins nothing."""
    return settings.embedded and status(StackFolder(path=settings.state_folder)) is not None


def processes(settings: Settings) -> dict[str, list[int]]:
    """Process ids of the folder's stack by part: ``stack``, ``valkey``, ``workers``; empty when none runs."""
    found = status(StackFolder(path=settings.state_folder)) if settings.embedded else None
    if found is None:
        return {}
    return {"stack": [found["pid"]], "valkey": [found["valkey_pid"]], "workers": found["worker_pids"]}
