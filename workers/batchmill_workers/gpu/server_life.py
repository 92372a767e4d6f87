"""One life of a server: from its command to its readiness, the calls sent to it, and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from batchmill_core.catalog import Account
from batchmill_core.errors import CallError
from batchmill_core.request import Completion, Request
from batchmill_workers.api.engine import ApiEngine

from .call_times import CallTimes
from .server_greeting import Greeter
from .server_judge import NotSent, ServerJudge
from .server_process import ServerLost, ServerProcess, wait_unless_lost
from .server_ready import ReadyCheck, Served

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
_FOR_EVER = float("inf")
_ASK_FIRST_S, _ASK_MOST_S = 0.05, 1.0
_SICK_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeTerms:
    """What stays the same over all lives of one model's server."""

    model: str  # the catalogue's name
    upstream: str
    base_path: str
    ready_path: str | None
    capacity_rows: int
    call_timeout_s: float  # from when a call is sent
    start_timeout_s: float
    warm_up: bool


class ServerLife:
    """A server that listens on ``port`` under ``process``. ``over`` is done, with the reason, once it is lost."""

    def __init__(self, terms: LifeTerms, process: ServerProcess, port: int) -> None:
        root = f"http://{HOST}:{port}"
        account = Account(
            name=terms.model,
            base_url=root + terms.base_path,
            max_in_flight=terms.capacity_rows,
            timeout_s=2 * terms.call_timeout_s + terms.start_timeout_s,  # never reached: calls are cut off here
        )
        self.port = port
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.served: list[Served] = []
        self.load_s = self.warm_up_s = 0.0
        self._terms = terms
        self._process = process
        self._check = ReadyCheck(root, ready_path=terms.ready_path, base_path=terms.base_path)
        self._api = ApiEngine(account, lambda: None)
        self._greeter = Greeter(self._api, self.over, upstream=terms.upstream)
        self._judge = ServerJudge(
            model=terms.model,
            call_timeout_s=terms.call_timeout_s,
            over=self.over,
            check=self._check,
            greeter=self._greeter,
            give_up=self._give_up,
        )
        self._calls: set[asyncio.Timeout] = set()
        self._sick = False
        process.ended.add_done_callback(lambda ended: None if ended.cancelled() else self._lose(ended.result()))

    @property
    def pid(self) -> int:
        return self._process.pid

    # its beginning

    async def begin(self) -> None:
        """Waits until the server is ready and has answered once. Raises ServerLost with what stands in the way."""
        began_s = time.monotonic()
        deadline_s = began_s + self._terms.start_timeout_s
        await self._api.start()
        await self._until_ready(deadline_s)
        ready_s = time.monotonic()
        self.served = await asyncio.to_thread(self._check.served)
        if self._terms.warm_up:
            await self._greeter.warm_up(deadline_s, self.served)
        self.load_s, self.warm_up_s = ready_s - began_s, time.monotonic() - ready_s

    async def _until_ready(self, deadline_s: float) -> None:
        pause_s = _ASK_FIRST_S
        while (lacks := await asyncio.to_thread(self._check.why_not)) is not None:
            if time.monotonic() > deadline_s:
                raise ServerLost(f"the server was not ready within {self._terms.start_timeout_s:g} s: {lacks}")
            await wait_unless_lost(self.over, pause_s)
            pause_s = min(2 * pause_s, _ASK_MOST_S)
        await wait_unless_lost(self.over, 0)

    # its calls

    @property
    def has_answered(self) -> bool:
        """Whether it has answered a row."""
        return self._judge.has_answered

    async def call(self, request: Request, times: CallTimes) -> Completion:
        """Answers one request by the API wing's way: its line, its limit in flight, its translation of answers.

        The device is charged from when it is sent. Raises NotSent, EngineLost when the server was lost with the call
        in it, or the CallError that it answered.
        """
        if self.over.done():
            raise NotSent
        try:
            async with self._cutting_off() as cutoff, self._api.quota.admit(request.model, max_wait_s=_FOR_EVER):
                with times.running():
                    times.charge()
                    self._judge.sent()
                    cutoff.reschedule(asyncio.get_running_loop().time() + self._terms.call_timeout_s)
                    completion = await self._api.complete(request)
        except TimeoutError:
            raise await self._judge.cut_off(times) from None
        except CallError as error:
            raise await self._judge.failed(error, times) from error.__cause__
        self._judge.answered()
        return completion

    @asynccontextmanager
    async def _cutting_off(self) -> AsyncIterator[asyncio.Timeout]:
        """Ends the block by a TimeoutError as soon as the server is lost."""
        async with asyncio.timeout(None) as cutoff:
            self._calls.add(cutoff)
            try:
                yield cutoff
            finally:
                self._calls.discard(cutoff)

    # its end

    def _give_up(self, reason: str) -> None:
        log.error("server_given_up model=%s pid=%d reason=%s", self._terms.model, self.pid, reason)
        self._sick = True
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.over.done():
            return
        self.over.set_result(reason)
        for cutoff in self._calls:
            if not cutoff.expired():  # by its own deadline, in this very turn of the loop
                cutoff.reschedule(asyncio.get_running_loop().time())

    async def end(self, *, grace_s: float, number: int) -> None:
        """Ends the server; calls still in flight raise EngineLost. Idempotent."""
        self._lose("the engine is closed")
        await self._judge.close()
        await self._process.stop(grace_s=_SICK_GRACE_S if self._sick else grace_s, number=number)
        await self._api.close()
