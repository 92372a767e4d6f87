"""An engine whose model runs in a process of its own: started, asked, metered, and started again when it died."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import EngineFigures
from batchmill_core.errors import (
    CallError,
    CallState,
    ConfigurationError,
    EngineDown,
    EngineFailed,
    EngineLost,
    InvalidRequest,
    TooLong,
)
from batchmill_core.request import Completion, Request
from batchmill_core.usage import Usage

from .call_times import CallTimes
from .context import context_tokens
from .engine_process import DeviceLost, EngineProcess, ProcessLost
from .frames import Frame
from .meter import DeviceMeter
from .sources import resolve_source
from .whole_files import cut_short

_START_TIMEOUT_S = 1800.0  # a large model on a cold disk
DEFAULT_TIMEOUT_S = 600.0  # as everywhere for models that run here
_ERRORS: dict[str, type[CallError]] = {
    "too_long": TooLong,
    "invalid_request": InvalidRequest,
    "engine_down": EngineDown,  # the device is lost, see ``batching_faults``: no row is to blame
}


class _NotBegun(Exception):  # a turn that a call's way takes, and no fault of anybody's
    """The process died while a call waited for the device."""


class HostedEngine:
    """What the engines of local models share. A kind of engine says how it is configured and asked.

    The process is ``python -m process_module``; ``hosted_process.serve`` is its other end. If it dies, the calls in
    flight raise EngineLost and the next one starts it again. It times its calls (``TimesCalls``): how long one takes
    depends on what runs beside it, so none is cut off while the engine comes further; when it does not for
    ``call_timeout_s`` seconds, the process is ended.
    """

    kind: ClassVar[str]  # its name among the entry points
    process_module: ClassVar[str]

    def __init__(self, *, model: ModelEntry, device: str, capacity_rows: int) -> None:
        self.model = model
        self.device = device
        self.capacity_rows = capacity_rows
        self.context_tokens = model.context_tokens
        self.call_timeout_s = model.timeout_s or DEFAULT_TIMEOUT_S
        self.meter = DeviceMeter()
        self.facts: Frame = {}  # what the process said when it was ready: load_s, warm_up_s, pid, and its own
        self.path: Path | None = None
        self._process = self._new_process()
        self._restart = asyncio.Lock()
        self._closed = False
        self._asked = self._output_tokens = 0
        self._told: Frame = {}

    # what a kind of engine says

    def check(self) -> None:
        """Raises ConfigurationError when something that the engine needs is not installed."""

    def configuration(self) -> Frame:
        """The first message to the process, beside ``path`` and ``context_tokens``."""
        raise NotImplementedError

    def message(self, request: Request) -> Frame:
        """A request as the process reads it. Raises InvalidRequest for what the engine cannot take."""
        raise NotImplementedError

    def in_words(self, fault: str) -> str:
        """Why the model cannot be loaded, by what its process said."""
        return fault

    def answer(self, last: Frame) -> Mapping[str, Any]:
        """What a call's last message says, as fields of a Completion."""
        return {"text": last.get("text"), "finish_reason": last.get("finish_reason")}

    # the Engine protocol

    async def start(self) -> None:
        """Loads the model and warms it up. Raises ConfigurationError with the model, its path and the reason."""
        self.check()
        if self.model.source is None:
            raise ConfigurationError(
                f"model {self.model.name}: engine {self.kind} needs a source: package:, hf: or a path"
            )
        self.path = await asyncio.to_thread(resolve_source, self.model.source)
        self.context_tokens = self.context_tokens or await asyncio.to_thread(context_tokens, self.path)
        where = f"model {self.model.name} cannot be loaded from {self.path}"
        if (cut := await asyncio.to_thread(cut_short, self.path)) is not None:
            raise ConfigurationError(f"{where}: {cut}")
        try:
            await self._load()
        except ProcessLost as error:
            raise ConfigurationError(f"{where}: {self.in_words(str(error))}") from error

    async def complete(self, request: Request) -> Completion:
        """Answers one request; see ``Engine.complete``."""
        message = self.message(request)
        self._asked += 1
        try:
            last, times = await self._ask(message)
        except _NotBegun:
            last, times = await self._ask(message, first=False)
        except TypeError as error:
            raise InvalidRequest(f"the request cannot be sent to the engine: {error}") from error
        finally:
            self._asked -= 1
        if "error" in last:
            raise self._error(last["error"], times)
        return self._completion(last, times)

    async def _ask(self, message: Frame, *, first: bool = True) -> tuple[Frame, CallTimes]:
        """The last message of a call, and its times.

        Raises _NotBegun when the process died before the device had the ``first`` such call: that was another row's
        doing, and it is asked once more. Not for ever, since a row can bring the process down while it is read, too.
        """
        await self._ensure_process()
        times = CallTimes(self.meter)
        try:
            with times.running():
                last = await self._process.call(message, lambda _: times.charge())  # the row is in the batch now
        except ProcessLost as error:
            lost = isinstance(error, DeviceLost)
            if first and times.device_ns is None and not lost and not self._closed:
                raise _NotBegun from error
            kind = EngineDown if lost else EngineLost
            raise kind(
                f"model {self.model.name}: {error}", device_ns=times.device_ns, latency_ms=times.latency_ms
            ) from error
        return last, times

    async def close(self) -> None:
        """Ends the process; calls in flight raise EngineLost. Idempotent."""
        self._closed = True
        await self._process.close()

    def figures(self) -> EngineFigures:
        """See ``Observable``; what only the process knows is as old as its last news."""
        running = min(self.meter.running, self.capacity_rows)  # those beyond wait in the library's own line
        return EngineFigures(
            running=running,
            waiting=max(0, self._asked - running),
            batch_rows=self._told.get("batch_rows"),
            kv_cache_percent=self._told.get("kv_cache_percent"),
            output_tokens=self._output_tokens,
            busy_ns=self.meter.busy_so_far_ns,
        )

    def news(self, frame: Frame) -> None:
        """Takes a message of the process about itself: ``figures``, and whatever a kind of engine adds."""
        self._told = {**self._told, **frame.get("figures", {})}

    # its process

    def _new_process(self) -> EngineProcess:
        return EngineProcess(self.process_module, self.news, silence_s=self.call_timeout_s)

    async def _load(self) -> None:
        configuration = {"path": str(self.path), "context_tokens": self.context_tokens, **self.configuration()}
        self.facts = await self._process.start(configuration, timeout_s=_START_TIMEOUT_S)
        self.context_tokens = self.facts.get("context_tokens", self.context_tokens)
        self.capacity_rows = self.facts.get("capacity_rows", self.capacity_rows)

    async def _ensure_process(self) -> None:
        """Starts the process again if it died; calls that come meanwhile wait for the same start."""
        async with self._restart:
            if self._process.alive:
                return
            if self._closed or self.path is None:
                state = "closed" if self._closed else "not started"
                raise EngineFailed(f"the engine of model {self.model.name} is {state}", ledger=CallState.VOID)
            await self._process.close()
            self._process = self._new_process()
            try:
                await self._load()
            except ProcessLost as error:
                raise EngineDown(f"model {self.model.name} cannot be loaded again: {error}") from error

    def _error(self, error: Frame, times: CallTimes) -> CallError:
        kind = _ERRORS.get(error["kind"], EngineFailed)
        return kind(
            f"model {self.model.name}: {error['message']}",
            device_ns=times.device_ns,
            latency_ms=times.latency_ms,
        )

    def _completion(self, last: Frame, times: CallTimes) -> Completion:
        usage = Usage(
            input=last["input_tokens"],
            cached_input=last.get("cached_tokens", 0),
            output=last.get("output_tokens", 0),
        )
        self._output_tokens += usage.output
        return Completion(
            **self.answer(last),
            usage=usage,
            latency_ms=times.latency_ms,
            ttft_ms=times.ms_until(last.get("first_token_ns")),
            model=self.model.upstream,
            device_ns=times.device_ns,
        )
