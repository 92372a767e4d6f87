"""What a catalogue entry may say under ``options`` for the vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from batchmill_core.errors import ConfigurationError

from .engine_options import (
    CHECK_MEMORY,
    FLAG,
    TEXT,
    is_plain,
    is_text,
    number,
    one_of,
    parse_options,
    table_of,
    whole,
)

DEFAULT_CPU_CACHE_BYTES = 4 << 30
_OURS = ("model", "enable_lora", "disable_log_stats", "stream_interval", "skip_tokenizer_init")
_ADAPTERS = table_of(is_text, 'a table of names and sources, such as { sql = "adapters/sql" }')
_ARGUMENTS = table_of(is_plain, "a table of texts, numbers, true, false, lists and tables")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Arguments of vLLM's engine under vLLM's own names. None leaves a choice to vLLM.

    ``tensor_parallel_size`` None means all devices of the worker's slot. ``lora`` maps names to sources of adapters,
    ``max_lora_rank`` None takes the largest rank among them. ``chat_template`` is a template or a path to one.
    ``kv_cache_memory_bytes`` None means 4 GiB on the processor, where vLLM would take nearly all of the host's memory.
    ``engine_args`` are any other arguments of the installed vLLM.
    """

    max_model_len: Annotated[int | None, whole(1)] = None
    gpu_memory_utilization: Annotated[float | None, number(0, 1, above=True)] = None
    kv_cache_memory_bytes: Annotated[int | None, whole(1)] = None
    quantization: Annotated[str | None, TEXT] = None
    tensor_parallel_size: Annotated[int | None, whole(1)] = None
    dtype: Annotated[str | None, one_of("auto", "half", "float16", "bfloat16", "float", "float32")] = None
    enforce_eager: Annotated[bool | None, FLAG] = None
    enable_prefix_caching: Annotated[bool | None, FLAG] = None
    max_num_seqs: Annotated[int | None, whole(1)] = None
    max_num_batched_tokens: Annotated[int | None, whole(1)] = None
    kv_cache_dtype: Annotated[str | None, TEXT] = None
    cpu_offload_gb: Annotated[float | None, number(0, unit="GiB")] = None
    lora: Annotated[Mapping[str, str], _ADAPTERS] = field(default_factory=dict)
    max_lora_rank: Annotated[int | None, whole(1)] = None
    chat_template: Annotated[str | None, TEXT] = None
    trust_remote_code: Annotated[bool | None, FLAG] = None
    seed: Annotated[int | None, whole(0)] = None
    runner: Annotated[str | None, one_of("auto", "generate", "pooling")] = None
    engine_args: Annotated[Mapping[str, Any], _ARGUMENTS] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> VllmOptions:
        """Raises ConfigurationError naming the option that is unknown or has a wrong value."""
        elsewhere = "Other arguments of vLLM go under engine_args."
        found = parse_options(cls, options, engine="vllm", model=model, beside=[CHECK_MEMORY], elsewhere=elsewhere)
        _check_engine_args(f"[models.{model}] options", found.engine_args, [one.name for one in fields(cls)])
        return found

    @property
    def pooling(self) -> bool:
        return self.runner == "pooling"

    def as_engine_args(self, *, devices: int, on_cpu: bool, context_tokens: int | None) -> dict[str, Any]:
        """Arguments for vLLM's engine, without the model and its adapters.

        ``devices`` are those of the slot, ``context_tokens`` what the catalogue entry says (None: nothing).
        """
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_PASSED}
        args = {name: value for name, value in given.items() if value is not None}
        args.setdefault("tensor_parallel_size", devices // _stages(devices, self.engine_args))
        if context_tokens is not None:
            args.setdefault("max_model_len", context_tokens)
        if on_cpu and "gpu_memory_utilization" not in args:
            args.setdefault("kv_cache_memory_bytes", DEFAULT_CPU_CACHE_BYTES)
        return {**args, **self.engine_args}


def _stages(devices: int, engine_args: Mapping[str, Any]) -> int:
    """Into how many stages the layers are split; 1 where vLLM will refuse the number."""
    stages = engine_args.get("pipeline_parallel_size")
    return stages if isinstance(stages, int) and 0 < stages <= devices and devices % stages == 0 else 1


_NOT_PASSED = frozenset({"lora", "max_lora_rank", "chat_template", "engine_args"})


def _check_engine_args(where: str, args: Mapping[str, Any], options: list[str]) -> None:
    for name in args:
        if name in options:
            raise ConfigurationError(f"{where}: engine_args.{name} is an option of its own; write options.{name}")
        if name in _OURS:
            raise ConfigurationError(f"{where}: engine_args.{name} is set by Batchmill itself; leave it out")
