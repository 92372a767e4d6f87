"""The engine that runs a server of the user's own on this host, such as vLLM, llama.cpp or Ollama, and asks it by HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import EngineFigures
from batchmill_core.errors import InvalidRequest
from batchmill_core.request import Completion, Request

from .call_times import CallTimes
from .hosted import DEFAULT_TIMEOUT_S
from .meter import DeviceMeter
from .server_judge import NotSent
from .server_keeper import ServerKeeper
from .server_launch import Launcher
from .server_life import ServerLife
from .server_options import ServerOptions


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
        launcher = Launcher(model, device, self.options, call_timeout_s=self.call_timeout_s)
        self._keeper = ServerKeeper(model.name, launcher, self._welcome)
        self._asked = self._output_tokens = 0

    # the Engine protocol

    async def start(self) -> None:
        """Starts the server and waits until it answers. Raises ConfigurationError with the reason and its last words."""
        await self._keeper.start()

    async def complete(self, request: Request) -> Completion:
        """Answers one request; see ``Engine.complete``."""
        request = replace(request, model=self.model.upstream)
        _check_numbers(request.params)
        self._asked += 1
        try:
            completion, times = await self._complete(request)
        finally:
            self._asked -= 1
        if completion.usage is not None:
            self._output_tokens += completion.usage.output
        return replace(completion, device_ns=times.device_ns)

    async def close(self) -> None:
        """Ends the server and all that it started; calls in flight raise EngineLost. Idempotent."""
        await self._keeper.close()

    def figures(self) -> EngineFigures:
        """See ``Observable``."""
        running = self.meter.running
        return EngineFigures(
            running=running,
            waiting=max(0, self._asked - running),
            output_tokens=self._output_tokens,
            busy_ns=self.meter.busy_so_far_ns,
        )

    async def _complete(self, request: Request) -> tuple[Completion, CallTimes]:
        while True:
            life = await self._keeper.living()
            times = CallTimes(self.meter)
            with suppress(NotSent):
                return await life.call(request, times), times

    def _welcome(self, life: ServerLife) -> None:
        found = next((one.context_tokens for one in life.served if one.name == self.model.upstream), None)
        self.context_tokens = self.model.context_tokens or found
        self.facts = {"load_s": life.load_s, "warm_up_s": life.warm_up_s, "pid": life.pid, "port": life.port}


def _check_numbers(params: Mapping[str, Any]) -> None:
    """JSON has no such numbers; written as null they would quietly mean the default."""
    for name, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequest(f"{name} is {value}, which is no number that a request can carry")
