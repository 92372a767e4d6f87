"""One attempt of one chunk: claim, load, answer, record, release."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import orjson

from batchmill_core.errors import CallError
from batchmill_core.job import Spec, Step
from batchmill_core.request import Completion, Request, RowStatus, TaskKind
from batchmill_db import steering
from batchmill_db.booking import NewCall, Reservation
from batchmill_db.ledger import CallEnd
from batchmill_db.past_calls import Past
from batchmill_db.results import NewResult

from . import validation
from .answer import Handback, QuotaWait, answer, as_call_error, given_up
from .calls import bound_of, new_call, request_of
from .claimed import Loaded
from .failpoints import failpoint
from .handbacks import children_of
from .lane import LINE_S, LONG_PAUSE_S, Lane
from .recorder import Recorder, not_sent
from .stored_rows import KIND as DAMAGED
from .stored_rows import stored_rows
from .summary import Summary, Tally
from .unit import Item, Unit

log = logging.getLogger(__name__)

_Group = Sequence[tuple[int, bytes]]

_BUDGET_POLL_S = 0.2
_INTERNAL_WAIT_S = 30.0


class Host(Protocol):
    """What an attempt needs of the process it runs in."""

    recorder: Recorder
    worker_id: str
    worker_name: str
    lease_ms: int
    runs: dict[int, ChunkRun]
    draining: bool

    def lane(self, step: Step) -> Lane: ...

    def fed(self, queue: str) -> None:
        """All rows of an attempt are on their way: there is a place for another chunk. Called once, and then `spent`."""

    def spent(self, queue: str) -> None:
        """An attempt that was fed has ended."""

    def stop_account(self, account: str, error: CallError) -> Awaitable[None]: ...


class ChunkRun:
    """One attempt, on the event loop. `run` answers what came of it; `stop` makes it hand back what is not sent."""

    def __init__(self, host: Host, loaded: Loaded) -> None:
        self.host = host
        self.claim = loaded.claim
        self.spec = Spec.from_dict(orjson.loads(loaded.claim.spec))
        self.step = self.spec.steps[loaded.claim.step]
        self.task = self.spec.task
        self.more_steps = loaded.claim.step + 1 < len(self.spec.steps)
        self.validator = None if self.spec.schema is None else validation.compile_schema(self.spec.schema)
        self.rng = random.Random()
        self.stopping: str | None = None
        self.attempt = host.recorder.attempt(loaded.claim)
        self._lane = host.lane(self.step)
        self._loaded = loaded
        self._seqs = itertools.count(1)
        self._tasks: dict[asyncio.Task[None], Unit] = {}
        self._calling: dict[asyncio.Task[None], Unit] = {}  # the unit that a task sends now: its own, or a part of it
        self._booking: set[asyncio.Task[None]] = set()  # tasks between two calls of a row
        self._handbacks: list[Handback] = []
        self._asides: list[asyncio.Future[Any]] = []
        self._fed = 0  # units that were booked and sent on their way
        self._crashed = False
        self._wait_s = 0.0
        self._tally = Tally()

    async def run(self) -> Summary:
        """Sends every row that has no final result yet, and ends the attempt."""
        self.host.runs[self.claim.chunk_id] = self
        try:
            await self._feed_safely(self._groups())
            self.host.fed(self.claim.queue)
            try:
                while self._tasks:
                    await asyncio.wait(self._tasks)
                await self._release()
            finally:
                self.host.spent(self.claim.queue)
        finally:
            self.host.runs.pop(self.claim.chunk_id, None)
        back = sum(len(h.rows) for h in self._handbacks)
        words = self._tally.words(handed_back=back, reason=self.stopping or "waiting")
        return Summary(text=words, queue=self.claim.queue)

    def stop(self, reason: str) -> None:
        """Sends nothing more: what waits is handed back, what is in flight may finish. Idempotent."""
        if self.stopping is None:
            self.stopping = reason
            myself = asyncio.current_task()
            for task, unit in self._tasks.items():
                if task is not myself and not self._calling.get(task, unit).sending:
                    task.cancel()

    def abandon(self) -> None:
        """Cuts off the calls in flight: their cost stays unknown with its bound."""
        self.stop("grace is over")
        for task in self._tasks:
            task.cancel()

    @property
    def in_flight(self) -> int:
        return sum(u.sending for u in self._calling.values())

    # feeding

    def _groups(self) -> list[_Group]:
        """The rows of each call as stored, (row, its request as JSON); parsed only when their turn comes."""
        loaded = self._loaded
        stored = stored_rows(loaded.frames, self.claim.rows)
        self._end_damaged([x for x in stored.damaged if x[0] not in loaded.finished])
        lines = [x for x in stored.lines if x[0] not in loaded.finished]
        size = self._lane.embed_rows if self.task is TaskKind.EMBED else 1
        return [lines[i : i + size] for i in range(0, len(lines), size)]

    def _end_damaged(self, damaged: Sequence[tuple[int, str]]) -> None:
        """Rows that nobody can read any more fail at once, so that they hold up neither their chunk nor their job."""
        if not damaged:
            return
        log.error("payload_damaged job=%d chunk=%d rows=%d", self.claim.job_id, self.claim.chunk_id, len(damaged))
        results = [
            NewResult(
                row=row,
                status=RowStatus.FAILED,
                error_kind=DAMAGED,
                error=f"{error}; submit the row again from its source",
                model=self.step.model,
                account=self.step.account,
                calls=(past := self._past(row)).calls,
                usage=past.usage,
                cost_nanousd=past.cost_nanousd,
                unknown_nanousd=past.unknown_nanousd,
                replaces=self._loaded.replaced.get(row),
            )
            for row, error in damaged
        ]
        self.save(results, ())

    def _unit(self, group: Sequence[tuple[int, bytes]]) -> Unit:
        items = [self._item(row, line) for row, line in group]
        return Unit(items=items, tries=max(self._past(i.row).tries for i in items))

    def _past(self, row: int) -> Past:
        return self._loaded.past.get(row) or Past()

    def _item(self, row: int, line: bytes) -> Item:
        payload = orjson.loads(line)
        past = self._past(row)
        return Item(
            row=row,
            request=Request.from_payload(payload, task=self.task),
            weight=len(line),
            replaces=self._loaded.replaced.get(row),
            calls=past.calls,
            cost_nanousd=past.cost_nanousd,
            unknown_nanousd=past.unknown_nanousd,
            usage=past.usage,
        )

    async def _feed_safely(self, groups: Sequence[_Group]) -> None:
        """Feeds; a fault of our own loses no row: what was not sent is handed back, and the log says why."""
        try:
            await self._feed(groups)
        except Exception as fault:
            log.exception("feeding_failed job=%d chunk=%d", self.claim.job_id, self.claim.chunk_id)
            self.stop("internal error")
            rest = [row for g in groups[self._fed :] for row, _ in g]
            self.hand_back(Handback(rows=rest, wait_s=_INTERNAL_WAIT_S, error=f"internal error: {fault!r}"[:500]))

    async def _feed(self, groups: Sequence[_Group]) -> None:
        window = self._lane.window
        while self._fed < len(groups) and not self._stopped():
            batch, tokens_of = self._batch(groups[self._fed : self._fed + self._lane.book_rows])
            await window.take(len(batch))
            sent = 0
            try:
                await self._line()
                with self._lane.coming(self.step, tokens_of):
                    await self.host.recorder.room()
                    booked = 0 if self._stopped() else await self._book(batch)
                    failpoint("after_reserve")
                    sent = self._send_off(batch[:booked])
            finally:
                window.give(len(batch) - sent)
            self._fed += sent
        rest = [row for g in groups[self._fed :] for row, _ in g]
        if rest:
            self.hand_back(Handback(rows=rest, wait_s=self._wait_s, error=self.stopping))

    def _batch(self, groups: Sequence[_Group]) -> tuple[list[Unit], list[int]]:
        """The first of these calls, as many as may be booked together, and the tokens that each is let in with.

        More than the rates let pass within seconds would be booked, turned away from the line and handed back, over and
        over: at a limit of tokens per minute that wrote many times more lines than there were calls.
        """
        units: list[Unit] = []
        tokens_of: list[int] = []
        for group in groups:
            unit = self._unit(group)
            needs = self._lane.tokens_of(request_of(unit, self.spec, self.step))
            if units and sum(tokens_of) + needs > self._lane.book_tokens:
                break
            units.append(unit)
            tokens_of.append(needs)
        return units, tokens_of

    async def _line(self) -> None:
        """Waits while the rows before these stand in line for the account's rates; a long pause ends the attempt."""
        while not self._stopped():
            if (pause_s := self._lane.pause_s()) > LONG_PAUSE_S:
                self._wait_s = pause_s
                self.stop(f"the provider asked to wait {pause_s:.0f} s")
            elif (line_s := self._lane.line_s(self.step)) > LINE_S:
                await asyncio.sleep(min(line_s - LINE_S, 1.0))
            else:
                return

    def _stopped(self) -> bool:
        if self.stopping is None and self.host.draining:
            self.stopping = "drain"
        if self.stopping is None and self.attempt.lost:
            self.stopping = "lease lost"
        return self.stopping is not None

    def _send_off(self, units: Sequence[Unit]) -> int:
        """Starts the way of booked units, unless the attempt was stopped while they were being booked."""
        if self._stopped():
            self.save((), [not_sent(u.seq, u.bound_nanousd) for u in units])
            return 0
        for unit in units:
            self._spawn(unit)
        return len(units)

    def _spawn(self, unit: Unit) -> None:
        task = asyncio.get_running_loop().create_task(answer(unit, self))
        self._tasks[task] = unit
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        unit = self._tasks.pop(task)
        self._calling.pop(task, None)
        self._lane.window.give()
        if task.cancelled():  # before it ran at all
            self.save((), [not_sent(unit.seq, unit.bound_nanousd)])
            self.hand_back(Handback(rows=unit.rows))
        elif (fault := task.exception()) is not None:
            log.error("row_way_failed job=%d rows=%s", self.claim.job_id, unit.rows, exc_info=fault)
            self.stop("internal error")
            if unit.tries >= self.step.max_retries:
                self.save(*given_up(unit, fault, self.step))
                return
            self.hand_back(Handback(rows=unit.rows, wait_s=_INTERNAL_WAIT_S, error=f"internal error: {fault!r}"[:500]))

    # booking

    async def _book(self, units: Sequence[Unit]) -> int:
        """Books the next call of each unit; answers how many may be sent, waiting for the budget if it must."""
        shared = self._lane.side_by_side
        for unit in units:
            unit.seq = next(self._seqs)
            unit.bound_nanousd = bound_of(unit, self.spec, self.step, side_by_side=shared)
        calls = [new_call(u, self.claim, self.step, worker=self.host.worker_name) for u in units]
        while True:
            alone = not self._in_flight_here()
            reservation = await self.host.recorder.reserve(calls, budgeted=self.claim.budgeted)
            if reservation.accepted or reservation.refusal is None:
                return reservation.accepted
            if not await self._may_wait(reservation, calls[0], alone=alone):
                return 0

    def _in_flight_here(self) -> set[asyncio.Task[None]]:
        """Rows whose calls may turn out cheaper than their bounds."""
        return self._tasks.keys() - self._booking

    async def _may_wait(self, reservation: Reservation, first: NewCall, *, alone: bool) -> bool:
        refusal = reservation.refusal
        if refusal is None or refusal.reason != "budget":
            self.stop("lease lost" if refusal is not None and refusal.reason == "lost" else "the job was stopped")
            return False
        if in_flight := self._in_flight_here():
            await asyncio.wait(in_flight, timeout=_BUDGET_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        if in_flight or not alone:  # what has ended is settled before the next reservation is looked at
            return not self._stopped()
        need = first.bound_nanousd or 0
        paused = await self.host.recorder.run(lambda conn: steering.pause_if_spent(conn, self.claim.job_id, need))
        self._wait_s = 0.0 if paused else 1.0
        self.stop("budget")
        return False

    # the way of a request: see answer.Way

    async def send(self, unit: Unit) -> Completion:
        request = request_of(unit, self.spec, self.step)
        if (task := asyncio.current_task()) is not None:
            self._calling[task] = unit
        try:
            completion = await self._lane.send(request, self.step, unit)
        except (CallError, QuotaWait):
            raise
        except Exception as fault:  # an engine's own bug or a plug-in's: it stays this row's trouble
            raise as_call_error(fault) from fault
        failpoint("after_call")
        return completion

    async def book_again(self, unit: Unit) -> bool:
        if self._stopped():
            return False
        task = asyncio.current_task()
        assert task is not None
        self._booking.add(task)
        booking = asyncio.ensure_future(self._book([unit]))
        try:
            booked = await asyncio.shield(booking)
        except asyncio.CancelledError:  # stopped meanwhile; what is booked all the same has to be void
            booked = await booking
        finally:
            self._booking.discard(task)
        if booked and self._stopped():
            self.save((), [not_sent(unit.seq, unit.bound_nanousd)])
            return False
        return booked == 1

    def save(self, rows: Sequence[NewResult], ends: Sequence[CallEnd]) -> None:
        self._tally.count(rows, ends)
        self.host.recorder.put(self.attempt, rows, ends)

    def hand_back(self, handback: Handback) -> None:
        self._handbacks.append(handback)

    def crash(self, error: CallError) -> None:
        if not self._crashed:  # every row in flight tells of the same death
            log.error("engine_lost job=%d chunk=%d error=%s", self.claim.job_id, self.claim.chunk_id, error)
        self._crashed = True
        self.stop("engine lost")

    def stop_account(self, error: CallError) -> None:
        self.stop(f"{'engine' if self.step.account is None else 'account'} stopped: {error.kind}")
        if self.step.account is not None:
            self._aside(self.host.stop_account(self.step.account, error))

    def stop_job(self, error: CallError) -> None:
        if self.stopping is None:
            self.stop(f"job stopped: {error.kind}")
            reason = f"{self.step.model}: {error.message}"
            self._aside(
                self.host.recorder.run(
                    lambda conn: steering.pause(conn, self.claim.job_id, kind=error.kind, reason=reason)
                )
            )

    def _aside(self, work: Awaitable[Any]) -> None:
        """Starts SQL work that the attempt waits for before it ends."""
        self._asides.append(asyncio.ensure_future(work))

    # ending

    async def _release(self) -> None:
        for fault in await asyncio.gather(*self._asides, return_exceptions=True):
            if isinstance(fault, Exception):
                log.error("stop_not_saved job=%d error=%s", self.claim.job_id, fault)
        failpoint("before_release")
        if self._crashed:
            await self.host.recorder.crash(self.attempt)
        else:
            await self.host.recorder.release(
                self.attempt, children_of(self._handbacks, self.spec, step=self.claim.step)
            )
        failpoint("after_release")
