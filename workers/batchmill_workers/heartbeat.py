"""Tells SQL that this process lives: extends its leases, notices pause, cancel and lost leases, watches the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from batchmill_core.job import JobState
from batchmill_db import chunks, jobs, telemetry
from batchmill_db.session import Connection, Database, DatabaseError

from .chunk_run import ChunkRun

log = logging.getLogger(__name__)

CONTROL_EVERY_S = 1.0
HUNG_LOOP_EXIT_CODE = 70


class Heartbeat:
    """A thread of its own, so that neither a busy loop nor a slow save makes a live worker look dead.

    A loop that does not turn for ``hung_after_s`` ends the process: its leases then run out and others go on.
    """

    def __init__(
        self,
        database: Database,
        loop: asyncio.AbstractEventLoop,
        *,
        worker_id: str,
        runs: Mapping[int, ChunkRun],
        describe: Callable[[], tuple[str, int, str | None]],
        beat_s: float,
        lease_ms: int,
        hung_after_s: float | None = None,
    ) -> None:
        self._database = database
        self._loop = loop
        self._worker_id = worker_id
        self._runs = runs
        self._describe = describe  # (state, calls in flight, why it waits)
        self._beat_s = beat_s
        self._lease_ms = lease_ms
        self._hung_after_s = hung_after_s if hung_after_s is not None else max(30.0, lease_ms / 1000)
        self._turned = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self.touched: Callable[[], None] | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        next_lease = 0.0
        while not self._stop.wait(min(CONTROL_EVERY_S, self._beat_s)):
            self._watch_loop()
            clock = time.monotonic()
            extend = clock >= next_lease
            try:
                self._beat(extend=extend)
            except DatabaseError as fault:
                log.warning("heartbeat_failed error=%s", fault)
                continue
            if extend:
                next_lease = clock + self._beat_s

    def _watch_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._turn)
        silent_s = time.monotonic() - self._turned
        if silent_s > self._hung_after_s:
            log.critical("event_loop_hung silent_s=%.0f; this process ends so that others take its chunks", silent_s)
            os._exit(HUNG_LOOP_EXIT_CODE)

    def _turn(self) -> None:
        self._turned = time.monotonic()

    def _beat(self, *, extend: bool) -> None:
        runs = list(self._runs.values())
        leases = {r.claim.chunk_id: r.claim.fence for r in runs}
        state, in_flight, waits = self._describe()

        def work(conn: Connection) -> tuple[set[int], dict[int, JobState]]:
            telemetry.beat(conn, self._worker_id, state=state, in_flight=in_flight, throttled=waits)
            lost = chunks.heartbeat(conn, leases, lease_ms=self._lease_ms) if extend else set()
            return lost, jobs.states(conn, sorted({r.claim.job_id for r in runs})) if runs else {}

        lost, states = self._database.run(work, patience_s=2.0)
        if self.touched is not None:
            self.touched()
        for run in runs:
            if run.claim.chunk_id in lost:
                run.attempt.lost = True
                self._tell(run, "lease lost")
            elif states.get(run.claim.job_id, JobState.CANCELLED) is not JobState.OPEN:
                self._tell(run, f"job {states.get(run.claim.job_id, 'removed')}")

    def _tell(self, run: ChunkRun, reason: str) -> None:
        self._loop.call_soon_threadsafe(run.stop, reason)
