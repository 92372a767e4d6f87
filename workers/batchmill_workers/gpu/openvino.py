"""The engine that runs a local model by OpenVINO GenAI: processors and Intel GPUs, GGUF files read directly."""

from __future__ import annotations

import importlib.util

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_core.request import Request

from .chat import text_messages
from .frames import Frame
from .gguf import architecture
from .hosted import HostedEngine
from .openvino_options import OpenVinoOptions
from .sampling import Sampling

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
        super().__init__(model=model, device=name, capacity_rows=self._options.capacity_rows)

    def check(self) -> None:
        if importlib.util.find_spec("openvino_genai") is None:
            raise ConfigurationError(
                f"model {self.model.name}: OpenVINO GenAI is not installed; pip install 'batchmill[local]'"
            )

    def configuration(self) -> Frame:
        return {"device": self.device, "options": self._options.as_dict()}

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
