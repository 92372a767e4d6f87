"""Batch sizes that outlive a process: given to an engine before it starts, saved as it finds better ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial

from batchmill_core.engine import Engine, Tunable
from batchmill_db import batch_sizes
from batchmill_db.session import Database, DatabaseError

from .device_kind import device_kind

log = logging.getLogger(__name__)

SAVE_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0
_PATIENCE_S = 2.0


class RememberedSizes:
    """Keeps what the engines of this process learn of their device, by model. Engines that learn nothing are passed over.

    ``device`` is an engine's device (``cuda:0``); remembered is its kind. ``save_every_s`` is how often larger sizes are
    saved. One that was halved is saved within a second, since what made it necessary may end this process, too.
    """

    def __init__(
        self, database: Database, engines: Mapping[str, Engine], device: str, *, save_every_s: float = SAVE_EVERY_S
    ) -> None:
        self._database = database
        self._engines = {model: engine for model, engine in engines.items() if isinstance(engine, Tunable)}
        self._kind = device_kind(device) if self._engines else device
        self._saved: dict[str, dict[int, int]] = {}
        self._every_s = save_every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-sizes", daemon=True)

    def load(self) -> None:
        """Gives each engine what is remembered for its model; before it starts. A database that is away is no fault."""
        for model, engine in self._engines.items():
            try:
                sizes = self._database.read(partial(batch_sizes.load, model=model, device=self._kind))
            except DatabaseError as fault:
                log.warning("batch_sizes_not_loaded model=%s error=%s", model, fault)
                continue
            self._saved[model] = dict(sizes)
            engine.use_batch_sizes(sizes)

    def start(self) -> None:
        """Begins to save what is new, in a thread of its own."""
        if self._engines:
            self._thread.start()

    def stop(self) -> None:
        """Saves a last time and ends the thread; the engines must still be there. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            self.save()

    def save(self) -> None:
        """Saves sizes that are not saved yet. What the database does not take now is tried again the next time."""
        for model, engine in self._engines.items():
            saved = self._saved.setdefault(model, {})
            new = {c: rows for c, rows in dict(engine.batch_sizes()).items() if saved.get(c) != rows}
            if not new:
                continue
            try:
                remember = partial(batch_sizes.remember, model=model, device=self._kind, sizes=new)
                self._database.run(remember, patience_s=_PATIENCE_S)
            except DatabaseError as fault:
                log.warning("batch_sizes_not_saved model=%s error=%s", model, fault)
                continue
            saved.update(new)
            log.info("batch_sizes_saved model=%s device=%s sizes=%s", model, self._kind, new)

    def _run(self) -> None:
        saved_s = time.monotonic()
        while not self._stop.wait(min(_LOOK_EVERY_S, self._every_s)):
            if self._is_urgent() or time.monotonic() - saved_s >= self._every_s:
                self.save()
                saved_s = time.monotonic()

    def _is_urgent(self) -> bool:
        """Whether a size is smaller than the one that is saved, or of a class of which none is."""
        return any(
            rows < self._saved.get(model, {}).get(c, rows + 1)
            for model, engine in self._engines.items()
            for c, rows in dict(engine.batch_sizes()).items()
        )
