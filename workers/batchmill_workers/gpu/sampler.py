"""Records what this process's devices and engines do, every few seconds, for ``batchmill gpus`` and the metrics page."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from batchmill_core.engine import Engine, Observable
from batchmill_core.settings import Settings
from batchmill_db import doorbells, samples
from batchmill_db.samples import DeviceReading, EngineReading
from batchmill_db.session import Connection, Database, DatabaseError

from .sampler_engine import EngineWatch
from .sampler_reader import Reader, reader_for

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
PRUNE_EVERY_S = 600.0
_LEAST_LOOK_S = 0.05
_PATIENCE_S = 1.0
_MS_PER_DAY = 86_400_000


class Sampler:
    """A thread of a worker process. Nothing that it meets disturbs the work: what cannot be read or saved is left out.

    Each sample goes to ``device_sample``; old ones are deleted (``sample_keep_days``, ``sample_max_rows``).
    """

    def __init__(self, database: Database, settings: Settings, *, worker: str, holder: str) -> None:
        self._database = database
        self._settings = settings
        self._worker = worker
        self._holder = holder
        self._host = socket.gethostname()
        self._reader: Reader | None = None
        self._watches: dict[str, EngineWatch] = {}  # by queue
        self._serving: Callable[[], bool] = lambda: True
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._silent = False  # the database does not answer, and that has been said

    def start(
        self,
        engines: Mapping[str, Engine],
        device: str,
        *,
        booked: Callable[[str], int] = lambda _: 0,
        serving: Callable[[], bool] = lambda: True,
        reader: Reader | None = None,
    ) -> None:
        """Begins to sample the device and these engines, by model; a worker without any samples nothing.

        ``booked`` says how many rows are held ready for a model's engine, ``serving`` whether this worker takes chunks.
        """
        if not engines:
            return
        self._serving = serving
        self._reader = reader or reader_for(device)
        for model, engine in engines.items():
            if isinstance(engine, Observable):
                self._watches[f"gpu.{model}"] = EngineWatch(
                    engine, worker=self._worker, model=model, booked=partial(booked, model)
                )
        self._thread.start()

    def stop(self) -> None:
        """Records what is left and ends the thread; the engines must still be there. Idempotent."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def holding(self, queue: str) -> AbstractContextManager[None]:
        """An attempt of a chunk of this queue is held for the length of the block: rows wait whenever nothing runs."""
        watch = self._watches.get(queue)
        return nullcontext() if watch is None else self._holding(watch)

    @contextmanager
    def _holding(self, watch: EngineWatch) -> Iterator[None]:
        with watch.bubble.holding():
            yield
        self._wake.set()

    # the thread

    def _run(self) -> None:
        assert self._reader is not None
        every_s = self._settings.sample_every_s
        sample_at = time.monotonic() + every_s
        prune_at = time.monotonic() + random.uniform(0.1, 1.0) * PRUNE_EVERY_S
        while not self._stop.is_set():
            self._wake.wait(min(LOOK_EVERY_S, max(0.0, sample_at - time.monotonic())))
            self._wake.clear()
            self._safely(self._look)
            if time.monotonic() >= sample_at:
                sample_at = max(sample_at + every_s, time.monotonic() + _LEAST_LOOK_S)
                self._safely(self.sample)
            if time.monotonic() >= prune_at:
                prune_at = time.monotonic() + PRUNE_EVERY_S
                self._safely(self.prune)
            self._stop.wait(_LEAST_LOOK_S)
        if time.monotonic() >= sample_at - every_s / 2:  # the means of a shorter time would say little
            self._safely(self.sample)
        self._safely(self._leave)
        self._reader.close()

    def _safely(self, duty: Callable[[], None]) -> None:
        try:
            duty()
        except DatabaseError as fault:
            if not self._silent:
                log.warning("samples_not_saved error=%s", fault)
            self._silent = True
        except Exception:
            log.exception("sampler_failed")
        else:
            self._silent = False

    def _look(self) -> None:
        """Looks into SQL for rows that wait, for engines of which this process holds no chunk."""
        assert self._reader is not None
        self._reader.peek()
        for queue, watch in self._watches.items():
            if not watch.bubble.needs_look:
                continue
            overdue = partial(doorbells.overdue, queues=[queue], waited_ms=0, limit=1)
            watch.bubble.look(self._serving() and bool(self._database.read(overdue)))

    def sample(self) -> None:
        """Records one sample of each device. Raises DatabaseError when it cannot be saved; the next one then covers it."""
        assert self._reader is not None
        readings = self._reader.read()
        with ExitStack() as seen:
            engines, busy_percents = [], []
            for watch in self._watches.values():
                engine, percent = seen.enter_context(watch.sampled(devices=len(readings)))
                engines.append(engine)
                busy_percents.append(percent)
            known = [_with_use(r, busy_percents) for r in readings]
            self._database.run(lambda conn: self._add(conn, known, engines), patience_s=_PATIENCE_S)

    def _add(self, conn: Connection, readings: Sequence[DeviceReading], engines: Sequence[EngineReading]) -> None:
        every_ms = self._settings.sample_every_s * 1000
        for reading in sorted(readings, key=lambda r: r.device):  # in one order, so that no two wait crosswise
            samples.add(conn, self._host, reading, engines, holder=self._holder, every_ms=every_ms)

    def prune(self) -> None:
        """Deletes what is too old or too much, in transactions that are short."""
        keep_ms = int(self._settings.sample_keep_days * _MS_PER_DAY)
        most = self._settings.sample_max_rows
        while self._database.run(
            lambda conn: samples.prune(conn, keep_ms=keep_ms, most_rows=most), patience_s=_PATIENCE_S
        ):
            if self._stop.wait(_LEAST_LOOK_S):
                return

    def _leave(self) -> None:
        assert self._reader is not None
        for device in self._reader.devices:
            leave = partial(samples.leave, host=self._host, device=device, holder=self._holder)
            self._database.run(leave, patience_s=_PATIENCE_S)


def _with_use(reading: DeviceReading, busy_percents: Sequence[float]) -> DeviceReading:
    """A part of a GPU does not tell its use; the share of time in which its engine computed is what is known then."""
    if reading.use_percent is not None or reading.memory_used_bytes is None or not busy_percents:
        return reading
    return replace(reading, use_percent=max(busy_percents))
