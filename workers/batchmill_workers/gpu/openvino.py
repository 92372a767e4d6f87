"""The engine that runs a local model by OpenVINO GenAI: processors and Intel GPUs, GGUF files read directly."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_core.request import Request

from .chat import text_messages
from .device_memory import DeviceMemory
from .frames import Frame
from .gguf import architecture
from .host_memory import host_memory
from .hosted import HostedEngine
from .model_memory import Needs, needs_of
from .openvino_options import OpenVinoOptions
from .sampling import Sampling

_LEAST_ROWS, _MOST_ROWS = 8, 128  # more make every row slower, and the processor hardly faster
_ROWS_OF_GPU = 64  # whose memory we do not know
_ROW_TOKENS = 1024  # of a usual row, prompt and answer together
_GIB = 1 << 30
_GGUF_KNOWN = ("llama", "qwen2", "qwen3")  # those that it surely reads


_NOT_OURS = (
    "the folder is not in OpenVINO's format (no .xml file): take engine transformers, a GGUF file, or export the model "
    "with optimum-cli export openvino"
)


class OpenVinoEngine(HostedEngine):
    """One model on one device, in a process of its own; rows of all chunks run in one continuous batch.

    A greedy answer does not depend on what else is in the batch where ``dynamic_quantization`` is off, or unknown to
    the processor.
    """

    kind = "openvino"
    process_module = "batchmill_workers.gpu.openvino_process"

    def __init__(self, *, model: ModelEntry, device: str = "cpu") -> None:
        self._options = OpenVinoOptions.parse(model.options, model=model.name)
        name = openvino_device(device, model=model.name)
        super().__init__(model=model, device=name, capacity_rows=self._options.capacity_rows or _MOST_ROWS)

    def check(self) -> None:
        if importlib.util.find_spec("openvino_genai") is None:
            raise ConfigurationError(
                f"model {self.model.name}: OpenVINO GenAI is not installed; pip install 'batchmill[local]'"
            )

    def configuration(self) -> Frame:
        options = self._options
        if self.device == "CPU" and self.path is not None:
            options = by_memory(options, needs_of(self.model, self.path, device="cpu"), host_memory())
        options = replace(options, capacity_rows=options.capacity_rows or _ROWS_OF_GPU)
        self.capacity_rows = options.capacity_rows
        return {"device": self.device, "options": options.as_dict()}

    def in_words(self, fault: str) -> str:
        if self.path is not None and self.path.is_dir():
            return fault if any(self.path.glob("*.xml")) else f"{fault}; {_NOT_OURS}"
        kind = None if self.path is None else architecture(self.path)
        if kind in (None, *_GGUF_KNOWN):
            return fault
        return (
            f"{fault}; it is of the architecture {kind!r}, which OpenVINO GenAI may not read from GGUF: take engine "
            "transformers, or the model in OpenVINO's own format"
        )

    def message(self, request: Request) -> Frame:
        return {
            "messages": text_messages(request, engine=self.kind),
            "sampling": Sampling.from_params(request.params).as_dict(),
            "schema": request.schema,
        }


def by_memory(options: OpenVinoOptions, needs: Needs, memory: DeviceMemory | None) -> OpenVinoOptions:
    """The options with what they leave open: half of the memory that the weights leave is the cache's, at least 1 GiB.

    It is not taken before rows need it. As many rows run side by side as it has room for, if they are of usual length;
    longer ones wait their turn, and are computed again from their beginnings if they had to give way.
    """
    if memory is not None and not options.cache_gb:
        options = replace(options, cache_gb=max(1, (memory.free_bytes - needs.weights - needs.runtime) // 2 // _GIB))
    if options.capacity_rows:
        return options
    usual_row_bytes = needs.row * _ROW_TOKENS // needs.row_tokens
    fitting = options.cache_gb * _GIB // usual_row_bytes if options.cache_gb and usual_row_bytes else _MOST_ROWS
    return replace(options, capacity_rows=max(_LEAST_ROWS, min(_MOST_ROWS, fitting)))


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
