"""Keeps a model's server running: each life that is lost is followed by the next, until that is in vain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from batchmill_core.errors import CallError, CallState, ConfigurationError, EngineDown, EngineFailed, Unreachable

from .server_launch import Launcher
from .server_life import ServerLife
from .server_log import last_words
from .server_process import ServerLost

log = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # how long a row waits in the loop for a server that is being started again
_COME_AGAIN_S = 10.0
_START_TRIES = 3
_MOST_PAUSE_S = 30.0


class ServerKeeper:
    """The lives of one model's server. ``welcome`` is told of each that begins. Belongs to one event loop."""

    def __init__(self, model: str, launcher: Launcher, welcome: Callable[[ServerLife], None]) -> None:
        self._model = model
        self._launcher = launcher
        self._welcome = welcome
        self._life: ServerLife | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # a life has begun, or none will
        self._gone: CallError | None = EngineFailed(
            f"the engine of model {model} is not started", ledger=CallState.VOID
        )

    async def start(self) -> None:
        """Starts the server and waits until it answers. Raises ConfigurationError with the reason and its last words."""
        await asyncio.to_thread(self._launcher.prepare)
        try:
            life = await self._launcher.begin()
        except ServerLost as fault:
            raise ConfigurationError(f"model {self._model}: {fault}") from fault
        self._begun(life)
        self._keeping = asyncio.create_task(self._keep(life))
        self._keeping.add_done_callback(self._kept)

    async def living(self) -> ServerLife:
        """The server that runs. Raises Unreachable, so that the row comes again, when none does for a while."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while self._gone is None and (self._life is None or self._life.over.done()):
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                message = f"model {self._model}: its server is being started again"
                raise Unreachable(message, wait_s=_COME_AGAIN_S) from None
        if self._gone is not None:
            raise type(self._gone)(self._gone.message, ledger=self._gone.call_state)
        assert self._life is not None
        return self._life

    async def close(self) -> None:
        """Ends the server and all that it started; calls in flight raise EngineLost. Idempotent."""
        self._lose_for_good(EngineFailed(f"the engine of model {self._model} is closed", ledger=CallState.VOID))
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        life, self._life = self._life, None
        if life is not None:
            await self._launcher.end(life)

    async def _keep(self, life: ServerLife) -> None:
        """Starts the server again whenever it was lost, until that is in vain.

        At once when it had answered, since a row may be what killed it; else after a pause that grows.
        """
        pause_s = 0.0
        while True:
            reason = await asyncio.shield(life.over)
            pause_s = 0.0 if life.has_answered else pause_s
            log.warning(
                "server_lost model=%s starts_again_s=%.0f reason=%s last=%s",
                self._model, pause_s, reason, last_words(self._launcher.log),
            )  # fmt: skip
            await self._launcher.end(life)
            await asyncio.sleep(pause_s)
            try:
                life = await self._begin_again()
            except ServerLost as fault:
                message = f"model {self._model}: the server cannot be started again: {fault}"
                self._lose_for_good(EngineDown(message, ledger=CallState.VOID))
                return
            self._begun(life)
            pause_s = _longer(pause_s)

    def _kept(self, keeping: asyncio.Task[None]) -> None:
        """A fault of our own in the keeper must not leave rows waiting for a server that nobody starts."""
        if not keeping.cancelled() and (fault := keeping.exception()) is not None:
            log.error("server_not_kept model=%s", self._model, exc_info=fault)
            self._lose_for_good(EngineDown(f"model {self._model}: internal error: {fault!r}"))

    async def _begin_again(self) -> ServerLife:
        pause_s = 0.0
        for _ in range(_START_TRIES - 1):
            try:
                return await self._launcher.begin()
            except ServerLost as fault:
                pause_s = _longer(pause_s)
                log.warning("server_not_started model=%s tries_again_s=%.0f reason=%s", self._model, pause_s, fault)
            await asyncio.sleep(pause_s)
        return await self._launcher.begin()

    def _begun(self, life: ServerLife) -> None:
        self._welcome(life)
        self._life, self._gone = life, None
        self._changed.set()
        log.info("server_ready model=%s pid=%d load_s=%.1f", self._model, life.pid, life.load_s)

    def _lose_for_good(self, gone: CallError) -> None:
        self._gone = gone
        self._changed.set()


def _longer(pause_s: float) -> float:
    return min(max(1.0, 2 * pause_s), _MOST_PAUSE_S)
