"""One worker process from start to drain: its event loop, engines, recorder, heartbeat and dispatcher."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import uvloop
from celery import Celery

from batchmill_core.broker import make_bell, publish
from batchmill_core.errors import BatchmillError, CallError, ConfigurationError
from batchmill_core.job import Step
from batchmill_core.settings import Settings
from batchmill_db import doorbells, migrate, reaping, telemetry
from batchmill_db.chunks import Child
from batchmill_db.doorbells import Doorbell
from batchmill_db.session import Connection, Database, DatabaseError
from batchmill_db.telemetry import WorkerRecord

from .api_lane import ApiLane
from .chunk_run import ChunkRun
from .chunk_slots import ChunkSlots
from .claimed import Loaded, claim_and_load
from .dispatcher import WINDOW_EXTRA, Cadence, Dispatcher
from .failpoints import failpoint
from .gpu.batching_remembered import RememberedSizes
from .gpu.devices import pinned
from .gpu.sampler import Sampler
from .heartbeat import Heartbeat
from .isolation import Isolation
from .lane import Lane
from .lanes import lanes_for, local_engines
from .local_lane import LocalLane
from .parentage import DEVICE_VARIABLE, DOWN_EXIT_CODE, RENEW_EXIT_CODE, UNFIT_EXIT_CODE
from .probe import PROBE_AFTER_MS, Prober
from .recorder import Recorder
from .summary import Summary
from .wear import Wear, memory_mib

log = logging.getLogger(__name__)

_MS = 1000
_GC_THRESHOLD = (50_000, 20, 50)
_MISFIT_WAIT_MS = 30_000


class WorkerProcess:
    """Everything that a worker process has beside Celery. The Host of its chunk runs.

    ``leave`` makes Celery drain and exit with a code of ``parentage``, when the process is to end by its own doing.
    """

    def __init__(
        self,
        settings: Settings,
        app: Celery,
        *,
        name: str,
        queues: Sequence[str],
        slots: int,
        threads: int | None = None,
        leave: Callable[[int], None] = lambda _: None,
        on_slots: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.worker_id = uuid.uuid4().hex
        self.worker_name = name
        self.lease_ms = int(settings.lease_s * _MS)
        self.queues = tuple(queues)
        self.slots = slots
        self.runs: dict[int, ChunkRun] = {}
        self.draining = False
        self.isolation = Isolation()
        self._state = "starting"
        self._bell = make_bell(settings, broker_url=app.conf.broker_url)
        self._device = os.environ.get(DEVICE_VARIABLE, "cpu")
        self._lanes: dict[str, Lane] = {}
        self._ringer = ThreadPoolExecutor(1, thread_name_prefix="ringer")
        self._slots = ChunkSlots(slots, most=threads, on_size=on_slots)
        self._leave = leave
        self._cut_off = False
        self._noted: asyncio.Future[None] | None = None  # held until it is done
        self._attempts = 0
        self._wear = Wear(max_chunks=settings.worker_max_chunks, max_memory_mib=settings.worker_max_memory_mb)
        self.database = Database(settings.database_address, pool_size=6)
        self.loop = uvloop.new_event_loop()
        self.recorder = Recorder(self.database, self.loop)
        self._loop_thread = threading.Thread(target=self._turn_loop, name="event-loop", daemon=True)
        self.heartbeat = Heartbeat(
            self.database,
            self.loop,
            worker_id=self.worker_id,
            runs=self.runs,
            describe=self._describe,
            beat_s=settings.beat_s,
            lease_ms=self.lease_ms,
        )
        self.cadence = Cadence.of(settings)
        self.dispatcher = Dispatcher(
            self.database,
            holder=self.worker_id,
            ring=self._ring,
            take=self._take,
            queues=self.queues,
            cadence=self.cadence,
        )
        self.prober: Prober | None = None
        self._sizes: RememberedSizes | None = None
        self._sampler = Sampler(self.database, settings, worker=name, holder=self.worker_id)

    # start

    def start(self) -> None:
        """Loads and starts everything before the first claim. Raises ConfigurationError when it is unfit."""
        migrate.check(self.database)
        self._register()
        self._loop_thread.start()
        self.recorder.start()
        self.heartbeat.start()
        began = time.monotonic()
        try:
            lanes = lanes_for(self.settings, self.queues, self._device)
            self._sizes = RememberedSizes(self.database, local_engines(lanes), self._device)
            self._sizes.load()
            for name, lane in lanes.items():
                self.call(lane.start())
                self._lanes[name] = lane
                if isinstance(lane, LocalLane):
                    lane.on_down = self._engine_down
            self._wear.check_fresh(memory_mib())
        except BatchmillError as fault:
            self._say_unfit(str(fault))
            raise
        # What is loaded now stays; rows come and go by the thousand, and few of them are in cycles.
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLD)
        load_ms = int((time.monotonic() - began) * _MS)
        self._state = "ready"
        self.database.run(lambda conn: telemetry.beat(conn, self.worker_id, state="ready", load_ms=load_ms))
        self.prober = Prober(
            self.database, [lane.account for lane in lanes.values() if isinstance(lane, ApiLane)], self.settings
        )
        self.prober.start()
        self._sizes.start()
        self._sampler.start(
            local_engines(lanes), self._device, booked=self._booked, serving=lambda: self._state == "ready"
        )
        self.heartbeat.touched = self._look_at_wear  # a long chunk may grow too
        self.dispatcher.start()
        log.info(
            "worker_ready name=%s queues=%s slots=%d load_ms=%d", self.worker_name, self.queues, self.slots, load_ms
        )

    def _register(self) -> None:
        record = WorkerRecord(
            id=self.worker_id,
            name=self.worker_name,
            host=socket.gethostname(),
            pid=os.getpid(),
            wing=self.queues[0].partition(".")[0],
            queues=self.queues,
            slots=self.slots,
            device=pinned(os.environ, self._device),
            version=version("batchmill"),
        )
        self.database.run(lambda conn: telemetry.register(conn, record))

    def _say_unfit(self, reason: str) -> None:
        self._state = "unfit"
        self.database.run(lambda conn: self._note_unfit(conn, reason))

    def _note_unfit(self, conn: Connection, reason: str) -> None:
        telemetry.beat(conn, self.worker_id, state="unfit", reason=reason)

    def _turn_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the loop and waits for it, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    # work

    def run_chunk(self, chunk_id: int) -> str:
        """Runs one chunk if it is to be had; the words are for Flower. Called on a Celery thread."""
        if self.draining:
            return "draining: left for others"
        self._slots.take()
        return self._run_in_slot(chunk_id)

    def _run_in_slot(self, chunk_id: int) -> str:
        """Runs a chunk in a slot that the caller took, and gives the slot back."""
        try:
            summary: Summary = self.call(self._run(chunk_id))
        finally:
            self._slots.give()
        if summary.queue is not None:
            self._look_at_wear()
        return summary.text

    async def _run(self, chunk_id: int) -> Summary:
        # Claimed only when its turn has come: a chunk that waited with a lease would be blamed for the crash of another.
        suspect = await self.recorder.run(lambda conn: reaping.is_suspect(conn, chunk_id))
        async with self.isolation.entered(alone=suspect):
            if self.draining:
                return Summary(text="draining: left for others")
            return await self._attempt(chunk_id)

    async def _attempt(self, chunk_id: int) -> Summary:
        loaded = await self.recorder.run(lambda conn: claim_and_load(conn, chunk_id, self.worker_id, self.lease_ms))
        if loaded is None:
            return Summary(text="nothing to do: taken, done or not open")
        failpoint("after_claim")
        try:
            run = ChunkRun(self, loaded)
        except BatchmillError as fault:
            return await self._misfit(loaded, fault)
        with self._sampler.holding(loaded.claim.queue):
            summary = await run.run()
        self._attempts += 1
        return summary

    async def _misfit(self, loaded: Loaded, fault: BatchmillError) -> Summary:
        """A chunk that this worker is not configured for goes back, for one that is."""
        claim = loaded.claim
        log.error("chunk_handed_back chunk=%d job=%d error=%s", claim.chunk_id, claim.job_id, fault)
        child = Child(rows=claim.rows, queue=claim.queue, step=claim.step, wait_ms=_MISFIT_WAIT_MS, error=str(fault))
        await self.recorder.release(self.recorder.attempt(claim), [child])
        return Summary(text=f"handed back: {fault}")

    def _take(self, chunk_id: int) -> bool:
        """Runs a chunk without a message, if a slot is free; for when the broker is away or lost one."""
        if self.draining or self._state != "ready" or not self._slots.try_take():
            return False
        threading.Thread(target=self._run_in_slot, args=(chunk_id,), name=f"chunk-{chunk_id}", daemon=True).start()
        return True

    def lane(self, step: Step) -> Lane:
        lane = self._lanes.get(step.queue)
        if lane is None:
            raise ConfigurationError(f"this worker serves {', '.join(self.queues)}, not {step.queue}")
        return lane

    def _ring(self, bell: Doorbell) -> None:
        publish(self._bell, bell.chunk_id, bell.queue, bell.label)

    def fed(self, queue: str) -> None:
        """See ``chunk_run.Host``: lends the slot of an attempt, and rings for the chunk that takes its place."""
        if self._slots.lend():
            self._ring_soon(queue)

    def spent(self, queue: str) -> None:
        """See ``chunk_run.Host``. Rings always: the attempt may have left rows for another, and its slot is free."""
        self._slots.end_loan()
        self._ring_soon(queue)

    def _ring_soon(self, queue: str) -> None:
        if not self.draining:
            self._ringer.submit(self._ring_next, queue)

    def _ring_next(self, queue: str) -> None:
        window = self.dispatcher.windows.get(queue, self.slots + WINDOW_EXTRA)
        try:
            bells = self.database.run(
                lambda conn: doorbells.ring(conn, windows={queue: window}, again_after_ms=self.cadence.again_ms)
            )
        except DatabaseError as fault:
            log.warning("next_not_rung queue=%s error=%s", queue, fault)  # the dispatcher does it when it can
        else:
            self.dispatcher.ring_all(bells)

    async def stop_account(self, account: str, error: CallError) -> None:
        """Stops a provider account for all hosts, with one message."""
        reason = f"{error.kind}: {error.message}"[:500]
        for run in self.runs.values():
            if run.step.account == account:
                run.stop(f"account stopped: {error.kind}")
        stopped = await self.recorder.run(
            lambda conn: telemetry.stop_account(
                conn, account, kind=error.kind, reason=reason, probe_after_ms=PROBE_AFTER_MS
            )
        )
        if stopped:
            log.error("account_stopped account=%s reason=%s", account, reason)

    def _booked(self, model: str) -> int:
        """Rows that are held ready for a model's engine or run in it."""
        return self._lanes[f"gpu.{model}"].window.taken

    def _describe(self) -> tuple[str, int, str | None]:
        waits = [w for w in (lane.describe() for lane in list(self._lanes.values())) if w]
        return self._state, sum(r.in_flight for r in list(self.runs.values())), "; ".join(waits) or None

    # stop

    def drain(self) -> None:
        """Sends nothing more; what is in flight may finish within the grace. Safe in a signal handler, idempotent."""
        self._wind_down("draining", "drain")
        if not self._cut_off:
            self._cut_off = True
            self.loop.call_soon_threadsafe(self.loop.call_later, self.settings.drain_s, self._grace_over)

    def _wind_down(self, state: str, reason: str) -> None:
        if not self.draining:
            self.draining = True
            self._state = state
            self.loop.call_soon_threadsafe(self._stop_runs, reason)

    def _stop_runs(self, reason: str) -> None:
        for run in list(self.runs.values()):
            run.stop(reason)

    def _look_at_wear(self) -> None:
        """Leaves for a fresh process when this one has done enough. Nothing hurries: what is in flight is waited for."""
        if self.draining:
            return
        memory = None if self._wear.max_memory_mib is None else memory_mib()
        if (reason := self._wear.reason(chunks=self._attempts, memory_mib=memory)) is not None:
            log.info("worker_renews name=%s reason=%s", self.worker_name, reason)
            self._wind_down("draining", "renewal")
            self._leave(RENEW_EXIT_CODE)

    def _engine_down(self, reason: str, *, for_good: bool) -> None:
        """Leaves because its engine serves nobody: for a start from scratch, or for good. Called on the event loop."""
        if self.draining:
            return
        log.error("engine_down name=%s for_good=%s reason=%s", self.worker_name, for_good, reason)
        self._wind_down("unfit" if for_good else "draining", "engine down")
        if for_good:
            self._noted = asyncio.ensure_future(self.recorder.run(lambda conn: self._note_unfit(conn, reason)))
        self._leave(UNFIT_EXIT_CODE if for_good else DOWN_EXIT_CODE)

    def _grace_over(self) -> None:
        for run in list(self.runs.values()):
            run.abandon()

    def stop(self) -> None:
        """Ends all threads after the last chunk was released. Idempotent."""
        renewing = self.draining and not self._cut_off
        self.draining = True
        self._slots.wait_idle(None if renewing else self.settings.drain_s + 5)
        self._ringer.shutdown()
        self.dispatcher.stop()
        if self.prober is not None:
            self.prober.stop()
        if self._sizes is not None:
            self._sizes.stop()
        self._sampler.stop()
        for lane in self._lanes.values():
            self.call(lane.close())
        self.recorder.stop()
        self.heartbeat.stop()
        self.database.run(lambda conn: telemetry.bury(conn, [self.worker_id]), patience_s=5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.database.close()
