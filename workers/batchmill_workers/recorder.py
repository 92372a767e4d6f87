"""Buffered, fenced saves: one thread that talks to SQL for all chunks of a process, by group commit.

When it was idle it commits at once; under load it waits until 128 rows came together or 50 ms went by, so that rows
share transactions. Reservations ride in the same commits. The buffer is bounded: `room` lets senders wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from batchmill_core.errors import CallState
from batchmill_core.request import RowStatus
from batchmill_db import booking, reaping, results
from batchmill_db.booking import NewCall, Reservation
from batchmill_db.chunks import Child, Claim
from batchmill_db.ledger import CallEnd
from batchmill_db.results import NewResult, Save
from batchmill_db.session import Connection, Database, DatabaseUnavailable

from .failpoints import failpoint

log = logging.getLogger(__name__)
T = TypeVar("T")

GROUP_ROWS = 128
GAP_S = 0.05
CAPACITY_ROWS = 4096
_OUTAGE_PATIENCE_S = 5.0
_OUTAGE_PAUSE_S = 0.2  # where the answer "not now" comes at once
_UNSTORABLE = "unstorable"
_SEQ_STEP = 10_000  # saves are numbered with room between, for the pieces of one that was refused as a whole


@dataclass(slots=True)
class Attempt:
    """What one attempt has waiting to be saved. Touched under the recorder's lock only."""

    claim: Claim
    saves: int = 0
    lost: bool = False
    results: list[NewResult] = field(default_factory=list)
    ends: list[CallEnd] = field(default_factory=list)


@dataclass(slots=True)
class _Errand:
    """Work for the SQL thread that somebody on the loop awaits."""

    work: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    urgent: bool


class Recorder:
    """Owns the SQL thread of a worker process. Its methods are called on the event loop."""

    def __init__(
        self,
        database: Database,
        loop: asyncio.AbstractEventLoop,
        *,
        gap_s: float = GAP_S,
        group_rows: int = GROUP_ROWS,
        capacity_rows: int = CAPACITY_ROWS,
    ) -> None:
        self._database = database
        self._loop = loop
        self._gap_s = gap_s
        self._group_rows = group_rows
        self._capacity_rows = capacity_rows
        self._lock = threading.Condition()
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._errands: list[_Errand] = []
        self._buffered = 0
        self._urgent = False
        self._stopping = False
        self._waiters: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self.last_commit_s = 0.0  # how long the last group commit took

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Saves what is buffered and ends the thread. Idempotent."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join()

    def attempt(self, claim: Claim) -> Attempt:
        return Attempt(claim=claim)

    def put(self, attempt: Attempt, rows: Sequence[NewResult], ends: Sequence[CallEnd]) -> None:
        """Buffers finished rows and the ends of calls; they are saved within about 50 ms."""
        with self._lock:
            attempt.results.extend(rows)
            attempt.ends.extend(ends)
            self._attempts[(attempt.claim.chunk_id, attempt.claim.fence)] = attempt
            before = self._buffered
            self._buffered += max(len(rows), 1)
            if before == 0 or before < self._group_rows <= self._buffered:
                self._lock.notify()

    async def room(self) -> None:
        """Waits until the buffer has room, so that memory stays bounded while the database is slow or away."""
        while True:
            with self._lock:  # else the last commit could pass by between the look and the wait
                if self._buffered < self._capacity_rows:
                    return
                waiter: asyncio.Future[None] = self._loop.create_future()
                self._waiters.append(waiter)
            await waiter

    async def reserve(self, calls: Sequence[NewCall], *, budgeted: bool) -> Reservation:
        """Books calls before they are sent; they ride with the next group commit."""
        return await self._errand(lambda conn: booking.reserve(conn, calls, budgeted=budgeted), urgent=False)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Runs idempotent SQL in a transaction of the SQL thread, soon. Raises DatabaseError if it is refused."""
        return await self._errand(work, urgent=True)

    async def release(self, attempt: Attempt, children: Sequence[Child]) -> bool:
        """Saves what the attempt has buffered and ends it, in one transaction; answers whether it still was the owner."""
        with self._lock:
            self._attempts.pop((attempt.claim.chunk_id, attempt.claim.fence), None)
            save = self._take(attempt, children=children, releases=True)
        try:
            saved = await self.run(lambda conn: results.save(conn, save))
        except DatabaseUnavailable:
            raise
        except Exception as fault:  # noqa: BLE001  # drivers raise what they please for a value that they cannot send
            log.error("release_refused chunk=%d error=%s", save.claim.chunk_id, fault)
            await asyncio.to_thread(self._save_apart, attempt, save)
            bare = replace(save, results=(), ends=())
            saved = await self.run(lambda conn: results.save(conn, bare))
        return saved.live

    async def crash(self, attempt: Attempt) -> None:
        """Saves what the attempt has buffered and gives its chunk up as crashed, in one transaction."""
        with self._lock:
            self._attempts.pop((attempt.claim.chunk_id, attempt.claim.fence), None)
            save = self._take(attempt)

        def work(conn: Connection) -> None:
            results.save(conn, save)
            reaping.crash(conn, attempt.claim)

        await self.run(work)

    async def _errand(self, work: Callable[[Connection], T], *, urgent: bool) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        with self._lock:
            if self._stopping:
                raise DatabaseUnavailable("this worker is stopping")
            self._errands.append(_Errand(work=work, future=future, urgent=urgent))
            self._urgent = self._urgent or urgent
            self._lock.notify()
        return await future

    def _take(self, attempt: Attempt, *, children: Sequence[Child] = (), releases: bool = False) -> Save:
        attempt.saves += _SEQ_STEP
        rows, attempt.results = attempt.results, []
        ends, attempt.ends = attempt.ends, []
        return Save(
            claim=attempt.claim, seq=attempt.saves, results=rows, ends=ends, children=children, releases=releases
        )

    def _work(self) -> None:
        last = 0.0
        while True:
            with self._lock:
                while not self._stopping and not self._due(last):
                    self._lock.wait(self._patience(last))
                if self._stopping and not self._attempts and not self._errands:
                    return
                # In one order everywhere, so that two workers' commits never wait for each other on PostgreSQL.
                attempts = sorted(self._attempts.values(), key=lambda a: (a.claim.job_id, a.claim.chunk_id))
                self._attempts = {}
                saves = [(a, self._take(a)) for a in attempts]
                errands, self._errands = self._errands, []
                self._buffered, self._urgent = 0, False
                waiters, self._waiters = self._waiters, []
            started = time.monotonic()
            answers = self._commit(saves, errands)
            last = time.monotonic()
            self.last_commit_s = last - started
            log.debug(
                "group_commit saves=%d rows=%d errands=%d ms=%.1f",
                len(saves),
                sum(len(s.results) for _, s in saves),
                len(errands),
                self.last_commit_s * 1000,
            )
            self._tell(answers, waiters)

    def _due(self, last: float) -> bool:
        if self._urgent or self._buffered >= self._group_rows:
            return True
        waiting = bool(self._attempts or self._errands)
        return waiting and time.monotonic() - last >= self._gap_s

    def _patience(self, last: float) -> float | None:
        if not (self._attempts or self._errands):
            return None
        return max(0.001, self._gap_s - (time.monotonic() - last))

    def _commit(self, saves: Sequence[tuple[Attempt, Save]], errands: Sequence[_Errand]) -> list[tuple[_Errand, Any]]:
        """One transaction for all saves and reservations; urgent errands follow, each in its own."""
        riding = [e for e in errands if not e.urgent]
        answers = self._together(saves, riding) if saves or riding else []
        answers += [(e, self._alone(e)) for e in errands if e.urgent]
        return answers

    def _together(self, saves: Sequence[tuple[Attempt, Save]], riding: Sequence[_Errand]) -> list[tuple[_Errand, Any]]:
        try:
            answers = self._insist(lambda conn: self._all(conn, saves, riding))
        except Exception as fault:  # noqa: BLE001  # as in `release`
            log.error("group_commit_refused saves=%d error=%s", len(saves), fault)
        else:
            if saves:
                failpoint("after_commit")
            return answers
        for attempt, save in saves:
            self._save_apart(attempt, save)
        return [(e, self._alone(e)) for e in riding]

    def _all(
        self, conn: Connection, saves: Sequence[tuple[Attempt, Save]], riding: Sequence[_Errand]
    ) -> list[tuple[_Errand, Any]]:
        for attempt, save in saves:
            if not results.save(conn, save).live:
                attempt.lost = True
        answers = [(e, e.work(conn)) for e in riding]
        if saves:
            failpoint("before_commit")
        return answers

    def _insist(self, work: Callable[[Connection], T]) -> T:
        """Tries for as long as the process lives while the database is away; paid answers are worth the wait."""
        while True:
            try:
                return self._database.run(work, patience_s=_OUTAGE_PATIENCE_S)
            except DatabaseUnavailable as fault:
                log.warning("database_away buffered=%d error=%s", self._buffered, fault)
                time.sleep(_OUTAGE_PAUSE_S)

    def _alone(self, errand: _Errand) -> Any:
        try:
            return self._insist(errand.work)
        except Exception as fault:  # noqa: BLE001  # the edge of this thread: whoever awaits it gets the fault
            return fault

    def _save_apart(self, attempt: Attempt, save: Save) -> None:
        """Saves row by row what was refused together, so that one row that cannot be stored harms no other."""
        ends = {e.seq: e for e in save.ends}
        pieces = [([row], [ends.pop(s) for s in row.seqs if s in ends]) for row in save.results]
        pieces.append(([], list(ends.values())))
        first = save.seq - _SEQ_STEP + 1
        for i, (rows, own) in enumerate(pieces):
            piece = Save(claim=save.claim, seq=first + i, results=rows, ends=own)
            attempt.lost = not self._save_piece(piece) or attempt.lost

    def _save_piece(self, piece: Save) -> bool:
        """Saves one row with its calls; what the database refuses of them is left out, step by step."""
        for version in _versions(piece):
            try:
                return self._insist(partial(_live, version))
            except Exception as fault:  # noqa: BLE001  # as in `release`
                rows = [r.row for r in piece.results]
                log.error("row_cannot_be_stored job=%d rows=%s error=%s", piece.claim.job_id, rows, fault)
        return True

    def _tell(self, answers: Sequence[tuple[_Errand, Any]], waiters: Sequence[asyncio.Future[None]]) -> None:
        def deliver() -> None:
            for errand, answer in answers:
                if errand.future.done():
                    continue
                if isinstance(answer, Exception):
                    errand.future.set_exception(answer)
                else:
                    errand.future.set_result(answer)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

        if answers or waiters:
            self._loop.call_soon_threadsafe(deliver)


def _live(save: Save, conn: Connection) -> bool:
    return results.save(conn, save).live


def _versions(piece: Save) -> Iterator[Save]:
    """The piece as it is; without its answer; and without what the provider said of its usage either."""
    yield piece
    yield replace(piece, results=[_unstorable(r) for r in piece.results])
    unknown = [CallEnd(seq=e.seq, state=CallState.UNKNOWN, error_kind=_UNSTORABLE) for e in piece.ends]
    bare = [replace(_unstorable(r), usage=None, cost_nanousd=None) for r in piece.results]
    yield replace(piece, results=bare, ends=unknown)


def _unstorable(row: NewResult) -> NewResult:
    return NewResult(
        row=row.row,
        status=RowStatus.FAILED,
        error_kind=_UNSTORABLE,
        error="the database refused to store this row's answer; the worker's log says why",
        usage=row.usage,
        cost_nanousd=row.cost_nanousd,
        unknown_nanousd=row.unknown_nanousd,
        calls=row.calls,
        seqs=row.seqs,
        replaces=row.replaces,
    )


def not_sent(seq: int, bound_nanousd: int | None) -> CallEnd:
    """The end of a call that was booked and never sent."""
    return CallEnd(seq=seq, state=CallState.VOID, bound_nanousd=bound_nanousd, error_kind="not_sent")
