"""What the calls that fail say about their server: whether it is lost, hangs, or answers nothing but faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

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

from .call_times import CallTimes
from .server_greeting import Greeter
from .server_pulse import Pulse
from .server_ready import ReadyCheck

_NEWS_S = 1.0  # how long after a broken connection the end of its process may become known
_BROKEN = (ConnectionLost, MalformedResponse, Unreachable)


class NotSent(Exception):
    """The server was lost before this call was sent: it may be sent to the next."""


class ServerJudge:
    """Judges one life of a server, whose end is ``over``. ``give_up`` ends a server that is of no use any more."""

    def __init__(
        self,
        *,
        model: str,
        call_timeout_s: float,
        over: asyncio.Future[str],
        check: ReadyCheck,
        greeter: Greeter,
        give_up: Callable[[str], None],
    ) -> None:
        self._model = model
        self._call_timeout_s = call_timeout_s
        self._over = over
        self._check = check
        self._greeter = greeter
        self._give_up = give_up
        self._pulse = Pulse()
        self._look: asyncio.Task[str | None] | None = None
        self._visit: asyncio.Task[None] | None = None

    @property
    def has_answered(self) -> bool:
        """Whether it has answered a row."""
        return self._pulse.has_answered

    def sent(self) -> None:
        """A call was sent."""
        self._pulse.sent(time.monotonic())

    def answered(self) -> None:
        """A call was answered."""
        self._pulse.answered(time.monotonic())

    async def cut_off(self, times: CallTimes) -> Exception:
        """What it means that a call was cut off, by its timeout or by the server's end."""
        if times.began_at_s is None:
            return NotSent()
        if not self._over.done() and await self._hangs(times.began_at_s):
            self._give_up(
                f"the server hangs: it answered nothing for {self._call_timeout_s:g} s (if its answers take that long, "
                "raise timeout_s)"
            )
        if self._over.done():
            return self._lost(times)
        message = f"the server did not answer within {self._call_timeout_s:g} s"
        return CallTimeout(message, latency_ms=times.latency_ms, device_ns=times.device_ns)

    async def failed(self, error: CallError, times: CallTimes) -> Exception:
        """What a call's failure means, now that this host's process can be looked at."""
        if error.http_status is not None:
            self._heed(error)
        elif isinstance(error, _BROKEN):
            await asyncio.wait([self._over], timeout=_NEWS_S)
            if not self._over.done() and isinstance(error, Unreachable) and self._pulse.unreachable(time.monotonic()):
                self._give_up(f"the server's process runs, but takes no connections: {error.message}")
            if self._over.done():
                return NotSent() if error.call_state is CallState.VOID else self._lost(times)
        if error.call_state is not CallState.VOID:  # else it was refused before the device did anything
            error.device_ns = times.device_ns
        return error

    async def close(self) -> None:
        """Ends what is still being looked at. Idempotent."""
        if self._visit is not None:
            self._visit.cancel()
            await asyncio.gather(self._visit, return_exceptions=True)

    def _heed(self, error: CallError) -> None:
        """An answer it is, if an error; a server that only has those is visited."""
        own = isinstance(error, Unavailable) and not isinstance(error, Overloaded)
        self._pulse.answered(time.monotonic(), fault=own)
        if self._pulse.only_faults and (self._visit is None or self._visit.done()):
            self._visit = asyncio.create_task(self._visit_it())

    async def _hangs(self, sent_at_s: float) -> bool:
        if not self._pulse.silent_since(sent_at_s):
            return False
        if self._pulse.in_vain_s(time.monotonic()) >= 2 * self._call_timeout_s:
            return True
        if self._look is None or self._look.done():  # one look for all calls that are cut off together
            self._look = asyncio.create_task(asyncio.to_thread(self._check.why_not))
        return await asyncio.shield(self._look) is not None

    async def _visit_it(self) -> None:
        """A server that answers nothing but faults of its own is ended when it fails at what it once could, too."""
        if await self._greeter.is_well(timeout_s=self._call_timeout_s):
            self._pulse.is_well()
        else:
            self._give_up("the server answers nothing but errors, even to what it once answered well")

    def _lost(self, times: CallTimes) -> EngineLost:
        message = f"model {self._model}: {self._over.result()}"
        return EngineLost(message, device_ns=times.device_ns, latency_ms=times.latency_ms)
