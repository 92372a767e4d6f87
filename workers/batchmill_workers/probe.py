"""Finds out whether a stopped account works again: key read anew, one cheap request, then its jobs go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import requests

from batchmill_core.catalog import Account
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, api_key
from batchmill_db import telemetry
from batchmill_db.session import Database, DatabaseError

log = logging.getLogger(__name__)

PROBE_AFTER_MS = 60_000
_EVERY_S = 2.0
_TIMEOUT_S = 10.0


class Prober:
    """A thread that probes the accounts whose keys this host has, when SQL says that a probe is due."""

    def __init__(self, database: Database, accounts: Sequence[Account], settings: Settings) -> None:
        self._database = database
        self._accounts = {a.name: a for a in accounts}
        self._settings = settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)

    def start(self) -> None:
        if self._accounts:
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_TIMEOUT_S + 1)

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.tick()
            except DatabaseError as fault:
                log.warning("prober_database error=%s", fault)

    def tick(self) -> None:
        """Probes what is due and opens the jobs of accounts that work again."""
        names = list(self._accounts)
        due = self._database.run(lambda conn: telemetry.due_probes(conn, names, next_after_ms=PROBE_AFTER_MS))
        for state in due:
            fault = self.probe(self._accounts[state.name])
            if fault is None:
                self._heal(state.name)
            else:
                log.info("account_still_stopped account=%s error=%s", state.name, fault)

    def _heal(self, name: str) -> None:
        opened = self._database.run(lambda conn: telemetry.heal_account(conn, name))
        log.warning("account_healed account=%s jobs_opened=%d", name, len(opened))

    def probe(self, account: Account) -> str | None:
        """None when the account's server accepts the key, else what is wrong."""
        try:
            key = api_key(account, folder=self._settings.home)
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = requests.get(f"{account.base_url.rstrip('/')}/models", headers=headers, timeout=_TIMEOUT_S)
        except ConfigurationError as fault:
            return str(fault)
        except requests.RequestException as fault:
            return type(fault).__name__
        return None if answer.ok or answer.status_code == requests.codes.not_found else f"HTTP {answer.status_code}"
