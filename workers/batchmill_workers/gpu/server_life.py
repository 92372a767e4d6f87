"""One life of a server: from its command to its readiness, the calls sent to it, and how it was lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from batchmill_core.catalog import Account
from batchmill_core.errors import (
    CallError,
    CallState,
    CallTimeout,
    ConnectionLost,
    EngineLost,
    MalformedResponse,
    Overloaded,
    Unavailable,
    Unreachable,
)
from batchmill_core.request import Completion, Request
from batchmill_workers.api.engine import ApiEngine

from .meter import DeviceMeter
from .server_greeting import Greeter
from .server_process import ServerLost, ServerProcess, wait_unless_lost
from .server_pulse import Pulse
from .server_ready import ReadyCheck, Served

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
_FOR_EVER = float("inf")
_ASK_FIRST_S, _ASK_MOST_S = 0.05, 1.0
_NEWS_S = 1.0  # how long after a broken connection the end of its process may become known
_SICK_GRACE_S = 1.0
_BROKEN = (ConnectionLost, MalformedResponse, Unreachable)


class NotSent(Exception):
    """The server was lost before this call was sent: it may be sent to the next."""


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


class Sent:
    """The times of one call. The device is charged from when the call was sent."""

    def __init__(self, meter: DeviceMeter) -> None:
        self._meter = meter
        self._token: int | None = None
        self._at_ns = 0
        self.at_s: float | None = None
        self.device_ns: int | None = None

    @contextmanager
    def metered(self) -> Iterator[None]:
        self._token, self._at_ns, self.at_s = self._meter.start(), time.monotonic_ns(), time.monotonic()
        try:
            yield
        finally:
            self.device_ns = self._meter.stop(self._token)

    @property
    def latency_ms(self) -> int:
        return (time.monotonic_ns() - self._at_ns) // 1_000_000 if self.at_s is not None else 0


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
        self._pulse = Pulse()
        self._calls: set[asyncio.Timeout] = set()
        self._sick = False
        self._look: asyncio.Task[str | None] | None = None
        self._visit: asyncio.Task[None] | None = None
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
        return self._pulse.has_answered

    async def call(self, request: Request, sent: Sent) -> Completion:
        """Answers one request by the API wing's way: its line, its limit in flight, its translation of answers.

        Raises NotSent, EngineLost when the server was lost with the call in it, or the CallError that it answered.
        """
        if self.over.done():
            raise NotSent
        try:
            async with self._cutting_off() as cutoff, self._api.quota.admit(request.model, max_wait_s=_FOR_EVER):
                with sent.metered():
                    self._pulse.sent(time.monotonic())
                    cutoff.reschedule(asyncio.get_running_loop().time() + self._terms.call_timeout_s)
                    completion = await self._api.complete(request)
        except TimeoutError:
            raise await self._cut_off(sent) from None
        except CallError as error:
            raise await self._judged(error, sent) from error.__cause__
        self._pulse.answered(time.monotonic())
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

    async def _cut_off(self, sent: Sent) -> Exception:
        timeout_s = self._terms.call_timeout_s
        if sent.at_s is None:
            return NotSent()
        if not self.over.done() and await self._hangs(sent.at_s):
            self._give_up(
                f"the server hangs: it answered nothing for {timeout_s:g} s (if its answers take that long, raise timeout_s)"
            )
        if self.over.done():
            return self._lost(sent)
        message = f"the server did not answer within {timeout_s:g} s"
        return CallTimeout(message, latency_ms=sent.latency_ms, device_ns=sent.device_ns)

    async def _hangs(self, sent_at_s: float) -> bool:
        if not self._pulse.silent_since(sent_at_s):
            return False
        if self._pulse.in_vain_s(time.monotonic()) >= 2 * self._terms.call_timeout_s:
            return True
        if self._look is None or self._look.done():  # one look for all calls that are cut off together
            self._look = asyncio.create_task(asyncio.to_thread(self._check.why_not))
        return await asyncio.shield(self._look) is not None

    async def _judged(self, error: CallError, sent: Sent) -> Exception:
        """What a call's failure means, now that this host's process can be looked at."""
        if error.http_status is not None:
            own = isinstance(error, Unavailable) and not isinstance(error, Overloaded)
            self._pulse.answered(time.monotonic(), fault=own)
            if self._pulse.only_faults and (self._visit is None or self._visit.done()):
                self._visit = asyncio.create_task(self._visit_it())
        elif isinstance(error, _BROKEN):
            await asyncio.wait([self.over], timeout=_NEWS_S)
            if not self.over.done() and isinstance(error, Unreachable) and self._pulse.unreachable(time.monotonic()):
                self._give_up(f"the server's process runs, but takes no connections: {error.message}")
            if self.over.done():
                return NotSent() if error.call_state is CallState.VOID else self._lost(sent)
        if error.call_state is not CallState.VOID:  # else it was refused before the device did anything
            error.device_ns = sent.device_ns
        return error

    async def _visit_it(self) -> None:
        """A server that answers nothing but faults of its own is ended when it fails at what it once could, too."""
        if await self._greeter.is_well(timeout_s=self._terms.call_timeout_s):
            self._pulse.is_well()
        else:
            self._give_up("the server answers nothing but errors, even to what it once answered well")

    def _lost(self, sent: Sent) -> EngineLost:
        message = f"model {self._terms.model}: {self.over.result()}"
        return EngineLost(message, device_ns=sent.device_ns, latency_ms=sent.latency_ms)

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
        if self._visit is not None:
            self._visit.cancel()
            await asyncio.gather(self._visit, return_exceptions=True)
        await self._process.stop(grace_s=_SICK_GRACE_S if self._sick else grace_s, number=number)
        await self._api.close()
