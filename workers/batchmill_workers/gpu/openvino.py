"""The engine that runs a local model by OpenVINO GenAI: processors and Intel GPUs, GGUF files read directly."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import (
    CallError,
    CallState,
    ConfigurationError,
    EngineFailed,
    EngineLost,
    InvalidRequest,
    TooLong,
)
from batchmill_core.request import Completion, Request
from batchmill_core.usage import Usage

from .chat import text_messages
from .context import context_tokens
from .engine_process import EngineProcess, ProcessLost
from .frames import Frame
from .meter import DeviceMeter
from .openvino_options import OpenVinoOptions
from .sampling import Sampling
from .sources import resolve_source

_PROCESS = "batchmill_workers.gpu.openvino_process"
_START_TIMEOUT_S = 1800.0  # a large model on a cold disk
_ERRORS: dict[str, type[CallError]] = {"too_long": TooLong, "invalid_request": InvalidRequest}


class OpenVinoEngine:
    """One model on one device, in a process of its own; rows of all chunks run in one continuous batch.

    With the default options a greedy answer does not depend on what else is in the batch. If the process dies, the
    calls in flight raise EngineLost and the next one starts it again.
    """

    def __init__(self, *, model: ModelEntry, device: str = "cpu") -> None:
        self._model = model
        self._device = openvino_device(device, model=model.name)
        self._options = OpenVinoOptions.parse(model.options, model=model.name)
        self._process = EngineProcess(_PROCESS)
        self._path: Path | None = None
        self._restart = asyncio.Lock()
        self._closed = False
        self.capacity_rows = self._options.capacity_rows
        self.context_tokens = model.context_tokens
        self.meter = DeviceMeter()
        self.facts: Frame = {}  # load_s, warm_up_s, pid

    async def start(self) -> None:
        """Loads the model and warms it up. Raises ConfigurationError with the model, its path and the reason."""
        if importlib.util.find_spec("openvino_genai") is None:
            raise ConfigurationError(
                f"model {self._model.name}: OpenVINO GenAI is not installed; pip install 'batchmill[local]'"
            )
        if self._model.source is None:
            raise ConfigurationError(
                f"model {self._model.name}: engine openvino needs a source: package:, hf: or a path"
            )
        self._path = await asyncio.to_thread(resolve_source, self._model.source)
        self.context_tokens = self.context_tokens or await asyncio.to_thread(context_tokens, self._path)
        try:
            await self._load()
        except ProcessLost as error:
            raise ConfigurationError(f"model {self._model.name} cannot be loaded from {self._path}: {error}") from error

    async def complete(self, request: Request) -> Completion:
        """Answers one chat request; see ``Engine.complete``."""
        frame = {
            "messages": text_messages(request, engine="openvino"),
            "sampling": Sampling.from_params(request.params).as_dict(),
            "schema": request.schema,
        }
        await self._ensure_process()
        run = _Run(self.meter)
        try:
            with run.metered():
                last = await self._process.call(frame, run.begin)
        except ProcessLost as error:
            raise EngineLost(
                f"model {self._model.name}: {error}", device_ns=run.device_ns, latency_ms=run.latency_ms
            ) from error
        except TypeError as error:
            raise InvalidRequest(f"the request cannot be sent to the engine: {error}") from error
        if "error" in last:
            raise self._error(last["error"], run)
        return self._completion(last, run)

    async def close(self) -> None:
        """Ends the process; calls in flight raise EngineLost. Idempotent."""
        self._closed = True
        await self._process.close()

    async def _load(self) -> None:
        configuration = {
            "path": str(self._path),
            "device": self._device,
            "options": self._options.as_dict(),
            "context_tokens": self.context_tokens,
        }
        self.facts = await self._process.start(configuration, timeout_s=_START_TIMEOUT_S)

    async def _ensure_process(self) -> None:
        """Starts the process again if it died; calls that come meanwhile wait for the same start."""
        async with self._restart:
            if self._process.alive:
                return
            if self._closed or self._path is None:
                state = "closed" if self._closed else "not started"
                raise EngineFailed(f"the engine of model {self._model.name} is {state}", ledger=CallState.VOID)
            await self._process.close()
            self._process = EngineProcess(_PROCESS)
            try:
                await self._load()
            except ProcessLost as error:
                raise EngineFailed(f"model {self._model.name}: {error}", ledger=CallState.VOID) from error

    def _error(self, error: Frame, run: _Run) -> CallError:
        kind = _ERRORS.get(error["kind"], EngineFailed)
        return kind(
            f"model {self._model.name}: {error['message']}",
            device_ns=run.device_ns,
            latency_ms=run.latency_ms,
        )

    def _completion(self, last: Frame, run: _Run) -> Completion:
        return Completion(
            text=last["text"],
            finish_reason=last["finish_reason"],
            usage=Usage(input=last["input_tokens"], output=last["output_tokens"]),
            latency_ms=run.latency_ms,
            ttft_ms=run.ms_until(last["first_token_ns"]),
            model=self._model.upstream,
            device_ns=run.device_ns,
        )


class _Run:
    """The times of one call. The device is charged from when the process took the row into its batch."""

    def __init__(self, meter: DeviceMeter) -> None:
        self._meter = meter
        self._token: int | None = None
        self._began_ns = self._ended_ns = time.monotonic_ns()
        self.device_ns: int | None = None

    @contextmanager
    def metered(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._ended_ns = time.monotonic_ns()
            if self._token is not None:
                self.device_ns = self._meter.stop(self._token)

    def begin(self, _message: Frame) -> None:
        self._token = self._meter.start()

    @property
    def latency_ms(self) -> int:
        return (self._ended_ns - self._began_ns) // 1_000_000

    def ms_until(self, moment_ns: int | None) -> int | None:
        """Milliseconds from the start to a moment of the same host's monotonic clock."""
        return None if moment_ns is None else max(0, moment_ns - self._began_ns) // 1_000_000


def openvino_device(device: str, *, model: str) -> str:
    """OpenVINO's name for a worker's device. Raises ConfigurationError for a device that it cannot use."""
    kind, _, number = device.lower().partition(":")
    if kind == "cpu":
        return "CPU"
    if kind == "gpu":
        return f"GPU.{number}" if number else "GPU"
    raise ConfigurationError(
        f"model {model}: engine openvino runs on the processor and on Intel GPUs, not on {device}; "
        "use --devices cpu, or engine vllm"
    )
