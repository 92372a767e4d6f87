"""The short call that shows that a server answers: before any row is sent, and when all that it answers is errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from batchmill_core.engine import Engine
from batchmill_core.errors import AuthFailed, CallError, CallTimeout, UnknownModel
from batchmill_core.request import Request, TaskKind

from .server_process import ServerLost, wait_unless_lost
from .server_ready import Served

_HELLO = ({"role": "user", "content": "Hi"},)
_PAUSE_S = 1.0


class Greeter:
    """Greets one life of a server by ``api``, until that life is ``over``."""

    def __init__(self, api: Engine, over: asyncio.Future[str], *, upstream: str) -> None:
        self._api = api
        self._over = over
        self._upstream = upstream
        chat = Request(model=upstream, messages=_HELLO, params={"max_tokens": 1})
        self._greetings = (chat, Request(task=TaskKind.EMBED, model=upstream, inputs=("Hi",)))
        self._answered: Request | None = None

    async def warm_up(self, deadline_s: float, served: Sequence[Served]) -> None:
        """Has one greeting of either kind answered: servers that load a model when it is first asked for do so now.

        Raises ServerLost when the server knows no such model, wants a key, or does not answer by the deadline.
        """
        refusals = []
        for greeting in self._greetings:
            refusal = await self._greet(greeting, deadline_s)
            if refusal is None:
                self._answered = greeting
                return
            refusals.append(refusal)
        if all(isinstance(refusal, UnknownModel) for refusal in refusals):
            raise ServerLost(f"the server does not serve {self._upstream!r} ({refusals[0].message}){_offer(served)}")

    async def is_well(self, *, timeout_s: float) -> bool:
        """Whether what it once answered is answered again. True also where it never was: that tells nothing."""
        if self._answered is None:
            return True
        error = await self._try_once(self._answered, time.monotonic() + timeout_s)
        return error is None or not error.retryable or error.waits

    async def _greet(self, greeting: Request, deadline_s: float) -> CallError | None:
        """None when the call was answered, else why it never will be."""
        while True:
            error = await self._try_once(greeting, deadline_s)
            if error is None or not error.retryable:
                if isinstance(error, AuthFailed):
                    raise ServerLost(f"the server wants a key ({error.message}); start it without one")
                return error
            if time.monotonic() > deadline_s:
                raise ServerLost(f"the server is ready, but did not answer: {error.message}")
            await wait_unless_lost(self._over, error.wait_s or _PAUSE_S)

    async def _try_once(self, greeting: Request, deadline_s: float) -> CallError | None:
        answer = asyncio.create_task(self._api.complete(greeting))
        either: list[asyncio.Future[Any]] = [answer, self._over]
        left_s = max(_PAUSE_S, deadline_s - time.monotonic())
        try:
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        if answer.done():
            fault = answer.exception()
            if fault is not None and not isinstance(fault, CallError):
                raise fault
            return fault
        await asyncio.gather(answer, return_exceptions=True)
        await wait_unless_lost(self._over, 0)
        return CallTimeout(f"nothing came within {left_s:.0f} s")


def _offer(served: Sequence[Served]) -> str:
    names = ", ".join(repr(one.name) for one in served)
    return f"; it serves {names}: write model = one of them" if names else "; correct model"
