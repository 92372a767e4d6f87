"""The engine that runs a server of the user's own on this host, such as vLLM, llama.cpp or Ollama, and asks it by HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import EngineFigures
from batchmill_core.errors import (
    CallError,
    CallState,
    ConfigurationError,
    EngineDown,
    EngineFailed,
    InvalidRequest,
    Unreachable,
)
from batchmill_core.request import Completion, Request

from .meter import DeviceMeter
from .server_launch import Launcher
from .server_life import NotSent, Sent, ServerLife
from .server_log import last_words
from .server_options import ServerOptions
from .server_process import ServerLost

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0  # of a call, as everywhere for models that run here
_PATIENCE_S = 30.0  # how long a row waits in the loop for a server that is being started again
_COME_AGAIN_S = 10.0
_START_TRIES = 3
_MOST_PAUSE_S = 30.0


class ServerEngine:
    """One server on one device: started before the first claim, asked by the API wing's way, started again if it ends.

    The environment that pins this worker to its device is the server's too. A call that was sent to a server that died
    raises EngineLost; one that was not yet sent waits for the next life.
    """

    kind = "server"

    def __init__(self, *, model: ModelEntry, device: str = "cpu") -> None:
        self.model = model
        self.device = device
        self.options = ServerOptions.parse(model.options, model=model.name)
        self.capacity_rows = self.options.capacity_rows
        self.context_tokens = model.context_tokens
        self.meter = DeviceMeter()
        self.facts: dict[str, Any] = {}  # load_s, warm_up_s, pid and port of the server that runs
        self.call_timeout_s = model.timeout_s or DEFAULT_TIMEOUT_S
        self._launcher = Launcher(model, device, self.options, call_timeout_s=self.call_timeout_s)
        self._life: ServerLife | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # a life has begun, or none will
        self._gone: CallError | None = EngineFailed(
            f"the engine of model {model.name} is not started", ledger=CallState.VOID
        )
        self._asked = self._output_tokens = 0

    # the Engine protocol

    async def start(self) -> None:
        """Starts the server and waits until it answers. Raises ConfigurationError with the reason and its last words."""
        await asyncio.to_thread(self._launcher.prepare)
        try:
            life = await self._launcher.begin()
        except ServerLost as fault:
            raise ConfigurationError(f"model {self.model.name}: {fault}") from fault
        self._welcome(life)
        self._keeper = asyncio.create_task(self._keep(life))
        self._keeper.add_done_callback(self._kept)

    async def complete(self, request: Request) -> Completion:
        """Answers one request; see ``Engine.complete``."""
        request = replace(request, model=self.model.upstream)
        _check_numbers(request.params)
        self._asked += 1
        try:
            completion, sent = await self._complete(request)
        finally:
            self._asked -= 1
        if completion.usage is not None:
            self._output_tokens += completion.usage.output
        return replace(completion, device_ns=sent.device_ns)

    async def close(self) -> None:
        """Ends the server and all that it started; calls in flight raise EngineLost. Idempotent."""
        self._lose_for_good(EngineFailed(f"the engine of model {self.model.name} is closed", ledger=CallState.VOID))
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        life, self._life = self._life, None
        if life is not None:
            await self._launcher.end(life)

    def figures(self) -> EngineFigures:
        """See ``Observable``."""
        running = self.meter.running
        return EngineFigures(
            running=running,
            waiting=max(0, self._asked - running),
            output_tokens=self._output_tokens,
            busy_ns=self.meter.busy_so_far_ns,
        )

    # calls

    async def _complete(self, request: Request) -> tuple[Completion, Sent]:
        while True:
            life = await self._living()
            sent = Sent(self.meter)
            with suppress(NotSent):
                return await life.call(request, sent), sent

    async def _living(self) -> ServerLife:
        """The server that runs. Raises Unreachable, so that the row comes again, when none does for a while."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while self._gone is None and (self._life is None or self._life.over.done()):
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                message = f"model {self.model.name}: its server is being started again"
                raise Unreachable(message, wait_s=_COME_AGAIN_S) from None
        if self._gone is not None:
            raise type(self._gone)(self._gone.message, ledger=self._gone.call_state)
        assert self._life is not None
        return self._life

    # its lives

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
                self.model.name, pause_s, reason, last_words(self._launcher.log),
            )  # fmt: skip
            await self._launcher.end(life)
            await asyncio.sleep(pause_s)
            try:
                life = await self._begin_again()
            except ServerLost as fault:
                message = f"model {self.model.name}: the server cannot be started again: {fault}"
                self._lose_for_good(EngineDown(message, ledger=CallState.VOID))
                return
            self._welcome(life)
            pause_s = _longer(pause_s)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """A fault of our own in the keeper must not leave rows waiting for a server that nobody starts."""
        if not keeper.cancelled() and (fault := keeper.exception()) is not None:
            log.error("server_not_kept model=%s", self.model.name, exc_info=fault)
            self._lose_for_good(EngineDown(f"model {self.model.name}: internal error: {fault!r}"))

    async def _begin_again(self) -> ServerLife:
        pause_s = 0.0
        for _ in range(_START_TRIES - 1):
            try:
                return await self._launcher.begin()
            except ServerLost as fault:
                pause_s = _longer(pause_s)
                log.warning("server_not_started model=%s tries_again_s=%.0f reason=%s", self.model.name, pause_s, fault)
            await asyncio.sleep(pause_s)
        return await self._launcher.begin()

    def _welcome(self, life: ServerLife) -> None:
        found = next((one.context_tokens for one in life.served if one.name == self.model.upstream), None)
        self.context_tokens = self.model.context_tokens or found
        self.facts = {"load_s": life.load_s, "warm_up_s": life.warm_up_s, "pid": life.pid, "port": life.port}
        self._life, self._gone = life, None
        self._changed.set()
        log.info("server_ready model=%s pid=%d load_s=%.1f", self.model.name, life.pid, life.load_s)

    def _lose_for_good(self, gone: CallError) -> None:
        self._gone = gone
        self._changed.set()


def _longer(pause_s: float) -> float:
    return min(max(1.0, 2 * pause_s), _MOST_PAUSE_S)


def _check_numbers(params: Mapping[str, Any]) -> None:
    """JSON has no such numbers; written as null they would quietly mean the default."""
    for name, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}, which is no number that a request can carry")
