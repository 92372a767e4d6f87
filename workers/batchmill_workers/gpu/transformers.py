"""The engine that runs any Hugging Face model by transformers: chat, embeddings and text classification."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Mapping
from typing import Any

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import CallError, ConfigurationError, EngineFailed, InvalidRequest
from batchmill_core.request import Request, TaskKind
from batchmill_workers.validation import compile_schema

from .call_times import CallTimes
from .chat import text_messages
from .engine_options import whole
from .engine_process import EngineProcess
from .frames import Frame
from .hosted import HostedEngine
from .sampling import Sampling
from .transformers_options import TransformersOptions
from .transformers_work import BROKEN

_DIMENSIONS = whole(1)
_NEEDED = ("torch", "transformers")


class Broken(EngineFailed):
    """What the model computed for this row is no answer, and would not be another time."""

    retryable = False


class TransformersEngine(HostedEngine):
    """One model on the devices of one slot, in a process of its own; rows of all chunks run in our dynamic batches.

    The model's files say whether it answers chat, embeds or classifies, unless ``options.task`` does. On the processor
    in float32 a greedy answer does not depend on what else is in the batch.
    """

    kind = "transformers"
    process_module = "batchmill_workers.gpu.transformers_process"

    def __init__(self, *, model: ModelEntry, device: str = "cpu") -> None:
        self._options = TransformersOptions.parse(model.options, model=model.name)
        self._sizes: dict[int, int] = {}
        self._running: dict[int, int] = {}  # rows of the full length by length class, of the batches begun last
        super().__init__(model=model, device=device, capacity_rows=self._options.rows(device))

    @property
    def task(self) -> TaskKind | None:
        """What the model does; None until it is loaded."""
        return TaskKind(self.facts["task"]) if "task" in self.facts else None

    def check(self) -> None:
        missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
        if missing is not None:
            raise ConfigurationError(
                f"model {self.model.name}: {missing} is not installed; pip install 'batchmill[transformers]'"
            )

    def configuration(self) -> Frame:
        self._running = {}
        return {
            "device": self.device,
            "options": self._options.as_dict(),
            "batch_sizes": {str(c): rows for c, rows in self._sizes.items()},
        }

    def message(self, request: Request) -> Frame:
        if self.task not in (None, request.task):
            raise InvalidRequest(
                f"model {self.model.name} does {self.task}, not {request.task}; its files say so, or options.task"
            )
        return _MESSAGES[request.task](request)

    def answer(self, last: Frame) -> Mapping[str, Any]:
        if "vectors" in last:
            return {"vectors": tuple(base64.b64decode(vector) for vector in last["vectors"])}
        return super().answer(last)

    def _error(self, error: Frame, times: CallTimes) -> CallError:
        fault = super()._error(error, times)
        if error["kind"] != BROKEN:
            return fault
        return Broken(fault.message, device_ns=fault.device_ns, latency_ms=fault.latency_ms)

    def news(self, frame: Frame) -> None:
        super().news(frame)
        if "batch_sizes" in frame:
            self._sizes = {int(c): rows for c, rows in frame["batch_sizes"].items()}
        if "running" in frame:
            self._running = {int(c): rows for c, rows in frame["running"].items()}

    def _new_process(self) -> EngineProcess:
        """One that was killed ran too much for the host's memory: half of it, so that the next does not die of it too."""
        if self._running and self._process.killed:
            self._sizes |= {c: max(1, min(self._sizes.get(c, n), n) // 2) for c, n in self._running.items()}
        return super()._new_process()

    # what is learned of the device, see Tunable

    def use_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        self._sizes = dict(sizes)

    def batch_sizes(self) -> Mapping[int, int]:
        return self._sizes


def _chat(request: Request) -> Frame:
    if request.schema is not None:
        _check_schema(request.schema)
    return {
        "messages": text_messages(request, engine=TransformersEngine.kind),
        "sampling": Sampling.from_params(request.params).as_dict(),
        "schema": request.schema,
    }


def _embedding(request: Request) -> Frame:
    if not request.inputs:
        raise InvalidRequest("the request has no text to embed")
    dimensions = request.params.get("dimensions")
    refusal = None if dimensions is None else _DIMENSIONS.refusal("dimensions", dimensions)
    if refusal is not None:
        raise InvalidRequest(f"parameter {refusal}")
    _no_params(request, but="dimensions")
    return {"inputs": list(request.inputs), "dimensions": dimensions}


def _classification(request: Request) -> Frame:
    """The text of all messages is classified: there is one, unless the data set gave a conversation."""
    _no_params(request)
    messages = text_messages(request, engine=TransformersEngine.kind, task=TaskKind.CLASSIFY)
    return {"inputs": ["\n".join(message["content"] for message in messages)]}


_MESSAGES = {TaskKind.CHAT: _chat, TaskKind.EMBED: _embedding, TaskKind.CLASSIFY: _classification}


def _no_params(request: Request, *, but: str | None = None) -> None:
    unknown = next((name for name in request.params if name != but), None)
    if unknown is not None:
        raise InvalidRequest(f"parameter {unknown!r} means nothing to task {request.task}; leave it out")


def _check_schema(schema: Mapping[str, Any]) -> None:
    try:
        compile_schema(schema)
    except ConfigurationError as error:
        raise InvalidRequest(str(error)) from error
    except (RecursionError, TypeError) as error:  # hundreds of levels, or a number of more than 64 bits
        raise InvalidRequest(f"the schema cannot be read: {str(error).lower()}") from error
