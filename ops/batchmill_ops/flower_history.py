"""Flower's memory of tasks and workers, saved every few seconds, whole or not at all, so that a kill loses little.

Flower itself saves by ``shelve``, which makes one file or three, depending on the host, and which a kill between them
damages; and it writes as often when nothing happened.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections import Counter
from pathlib import Path

from flower.events import Events, EventsState

log = logging.getLogger(__name__)

_MOST_SHARE = 0.02  # of the event loop's time may go into saving


class History(Events):  # type: ignore[misc]  # Flower has no types
    """Events with another way to save. Everything runs on Flower's event loop, as there."""

    _saved_events = -1
    _not_before = 0.0

    def load_state(self) -> EventsState | None:
        """What was saved; None, with a word in the log, when it cannot be read: history is no reason not to start."""
        path = Path(self.db)
        try:
            saved = pickle.loads(path.read_bytes())  # written by us, into a folder that is our user's alone
            state, counters = saved["state"], saved["counters"]
            state.counter.update({name: Counter(counts) for name, counts in counters.items()})
        except FileNotFoundError:
            return None
        except Exception as fault:  # noqa: BLE001  # unpickling raises anything
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            log.warning("history_put_aside at=%s error=%s", aside, fault)
            return None
        return state

    def save_state(self) -> None:
        """Saves what came since the last time. Skipped while saving would take too much of the loop's time."""
        if self.state.event_count == self._saved_events or time.monotonic() < self._not_before:
            return
        begin = time.monotonic()
        content = pickle.dumps({"state": self.state, "counters": {n: dict(c) for n, c in self.state.counter.items()}})
        self._saved_events = self.state.event_count
        path = Path(self.db)
        new = path.with_name(f"{path.name}.new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
            new.replace(path)
        except OSError as fault:
            log.warning("history_not_saved error=%s", fault)
        now = time.monotonic()
        self._not_before = now + (now - begin) / _MOST_SHARE

    def stop(self) -> None:
        self._not_before = 0.0
        super().stop()
