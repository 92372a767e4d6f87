"""Publishes ready chunks and reaps dead attempts; every worker process carries one, one of all leads.

SQL is the truth and the broker a doorbell: what is published is marked first and rung for after the commit, so that a
crash in between or a lost message costs time only. While the broker is away an idle worker takes chunks from SQL itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from batchmill_core.settings import Settings
from batchmill_db import counters, doorbells, loading, merging, reaping, steering, telemetry
from batchmill_db.doorbells import Doorbell
from batchmill_db.session import Connection, Database, DatabaseError

log = logging.getLogger(__name__)

LEADER = "dispatcher"
WINDOW_EXTRA = 2
AGAIN_AFTER_MS = 15_000
LEAD_TTL_MS = 5_000
SUM_EVERY_S = 1.0
MERGE_EVERY_S = 2.0
BROKER_AWAY_POLL_S = 1.0
BROKER_AWAY_RING_S = 3.0
_ERROR_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often the leader does what, in seconds; ``beat_ms`` is the workers' heartbeat.

    A chunk that nobody took for ``again_ms`` after it was rung for is rung for again: its message may be lost.
    """

    publish_s: float = 0.2
    reap_s: float = 10.0
    beat_ms: int = 20_000
    again_ms: int = AGAIN_AFTER_MS

    @classmethod
    def of(cls, settings: Settings) -> Cadence:
        """What follows from the settings: whoever shortens leases wants lost messages found sooner too."""
        return cls(
            publish_s=settings.publish_every_s,
            reap_s=settings.reap_every_s,
            beat_ms=int(settings.beat_s * 1000),
            again_ms=min(AGAIN_AFTER_MS, int(settings.lease_s * 1000 / 4)),
        )


@dataclass(slots=True)
class _Due:
    """When the slower duties are due, on the monotonic clock."""

    reap: float = 0.0
    sums: float = 0.0
    merge: float = 0.0
    prune: float = field(default_factory=lambda: time.monotonic() + 60)


class Dispatcher:
    """The leader's thread. ``ring`` publishes one chunk to the broker and raises what the broker client raises."""

    def __init__(
        self,
        database: Database,
        *,
        holder: str,
        ring: Callable[[Doorbell], None],
        take: Callable[[int], bool],
        queues: Sequence[str],
        cadence: Cadence,
    ) -> None:
        self._database = database
        self._holder = holder
        self._ring = ring
        self._take = take  # runs a chunk in this process if a slot is free
        self._queues = queues
        self._cadence = cadence
        self._stop = threading.Event()
        self._due = _Due()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._last_idle_poll = time.monotonic()
        self.broker_away = False
        self._ring_again_at = 0.0
        self.windows: Mapping[str, int] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Gives the lead up and ends the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stop.wait(self._cadence.publish_s):
            try:
                self.tick()
            except DatabaseError as fault:
                log.warning("dispatcher_database error=%s", fault)
                self._stop.wait(_ERROR_PAUSE_S)
            except Exception:
                log.exception("dispatcher_failed")
                self._stop.wait(_ERROR_PAUSE_S)
        try:
            self._database.run(lambda conn: telemetry.resign(conn, LEADER, self._holder), patience_s=2)
        except DatabaseError:
            log.info("dispatcher_resign_failed; the lead runs out by itself")

    def tick(self) -> None:
        """One round: lead, then publish, and at their slower cadence sum, finish, merge and reap."""
        now = self._database.run(lambda conn: telemetry.lead(conn, LEADER, self._holder, ttl_ms=LEAD_TTL_MS))
        if now.leads:
            if now.since_tick_ms is not None and now.since_tick_ms > self._outage_ms:
                self._after_outage(now.since_tick_ms)
            self._lead()
        self._help_itself()

    @property
    def _outage_ms(self) -> int:
        """More silence than the death of a leader explains; less than what lets the lease of a live worker run out."""
        return max(LEAD_TTL_MS + 1000, min(2 * LEAD_TTL_MS, 2 * self._cadence.beat_ms))

    def _after_outage(self, silent_ms: int) -> None:
        """Nobody led for long: live workers could not beat either, so they get time to before any lease is reaped."""
        by_ms = self._cadence.beat_ms * 3 // 2
        extended = self._database.run(lambda conn: reaping.extend_all(conn, by_ms))
        if extended:  # none: nobody worked, as before the first worker of a day
            log.warning("leases_extended after_silence_ms=%d leases=%d by_ms=%d", silent_ms, extended, by_ms)
        self._due.reap = time.monotonic() + self._cadence.reap_s

    def _lead(self) -> None:
        clock = time.monotonic()
        if clock >= self._due.reap:
            self._due.reap = clock + self._cadence.reap_s
            for reaped in self._database.run(reaping.reap):
                log.warning(
                    "chunk_reaped chunk=%d job=%d crashes=%d outcome=%s",
                    reaped.chunk_id,
                    reaped.job_id,
                    reaped.crash_count,
                    reaped.outcome,
                )
        if clock >= self._due.merge:
            self._due.merge = clock + MERGE_EVERY_S
            self._database.run(merging.merge)
        self._publish()
        closed = self._database.run(steering.finish)
        for job_id in closed:
            log.info("job_done job=%d", job_id)
        if clock >= self._due.sums:
            self._due.sums = clock + SUM_EVERY_S
            self._database.run(counters.sum_counters)
            for job_id in self._database.run(loading.sweep):
                log.warning("loader_died job=%d", job_id)
        if clock >= self._due.prune:
            self._due.prune = clock + 3600
            self._database.run(telemetry.prune_workers)

    def _publish(self) -> None:
        if time.monotonic() < self._ring_again_at:
            return
        bells = self._database.run(self._mark)
        self.ring_all(bells)

    def _mark(self, conn: Connection) -> list[Doorbell]:
        slots: Counter[str] = Counter()
        for w in telemetry.live_workers(conn):
            if w.state == "ready":
                for q in w.queues:
                    slots[q] += w.slots
        self.windows = {q: n + WINDOW_EXTRA for q, n in slots.items()}
        return doorbells.ring(conn, windows=self.windows, again_after_ms=self._cadence.again_ms)

    def ring_all(self, bells: Sequence[Doorbell]) -> None:
        """Publishes chunks until one cannot be: each further try would cost seconds. They are rung for again later."""
        for bell in bells:
            if time.monotonic() < self._ring_again_at:
                return
            try:
                self._ring(bell)
                self.broker_away = False
            except Exception as fault:  # noqa: BLE001  # the broker client's errors are many; none may lose a row
                self.broker_away = True
                self._ring_again_at = time.monotonic() + BROKER_AWAY_RING_S
                log.warning("publish_failed chunk=%d queue=%s error=%s", bell.chunk_id, bell.queue, fault)
                return

    def _help_itself(self) -> None:
        """Takes a chunk from SQL when the broker is away, or when one was left lying though this worker is idle."""
        clock = time.monotonic()
        every = BROKER_AWAY_POLL_S if self.broker_away else self._cadence.again_ms / 1000
        if clock - self._last_idle_poll < every:
            return
        self._last_idle_poll = clock
        waited_ms = 0 if self.broker_away else self._cadence.again_ms
        for chunk_id in self._database.run(lambda conn: doorbells.overdue(conn, self._queues, waited_ms=waited_ms)):
            if not self._take(chunk_id):
                return
