"""What a catalogue entry may say under ``options`` for the vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

DEFAULT_CPU_CACHE_BYTES = 4 << 30
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_RUNNERS = ("auto", "generate", "pooling")
_OURS = ("model", "enable_lora", "disable_log_stats", "stream_interval", "skip_tokenizer_init")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Arguments of vLLM's engine under vLLM's own names. None leaves a choice to vLLM.

    ``tensor_parallel_size`` None means all devices of the worker's slot. ``lora`` maps names to sources of adapters,
    ``max_lora_rank`` None takes the largest rank among them. ``chat_template`` is a template or a path to one.
    ``kv_cache_memory_bytes`` None means 4 GiB on the processor, where vLLM would take nearly all of the host's memory.
    ``engine_args`` are any other arguments of the installed vLLM.
    """

    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    dtype: str | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    cpu_offload_gb: float | None = None
    lora: Mapping[str, str] = field(default_factory=dict)
    max_lora_rank: int | None = None
    chat_template: str | None = None
    trust_remote_code: bool | None = None
    seed: int | None = None
    runner: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> VllmOptions:
        """Raises ConfigurationError naming the option that is unknown or has the wrong kind of value."""
        where = f"[models.{model}] options"
        names = [one.name for one in fields(cls)]
        for name, value in options.items():
            if name not in names:
                raise ConfigurationError(
                    f"{where}: {name!r} is not an option of vllm{nearest(name, names)} "
                    "Other arguments of vLLM go under engine_args."
                )
            wrong = _CHECKS[name](value)
            if wrong:
                raise ConfigurationError(f"{where}: {name} is {value!r}; it must be {wrong}")
        _check_engine_args(where, options.get("engine_args", {}), names)
        return cls(**options)

    @property
    def pooling(self) -> bool:
        return self.runner == "pooling"

    def as_engine_args(self, *, devices: int, on_cpu: bool, context_tokens: int | None) -> dict[str, Any]:
        """Arguments for vLLM's engine, without the model and its adapters.

        ``devices`` are those of the slot, ``context_tokens`` what the catalogue entry says (None: nothing).
        """
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_PASSED}
        args = {name: value for name, value in given.items() if value is not None}
        args.setdefault("tensor_parallel_size", devices)
        if context_tokens is not None:
            args.setdefault("max_model_len", context_tokens)
        if on_cpu and "gpu_memory_utilization" not in args:
            args.setdefault("kv_cache_memory_bytes", DEFAULT_CPU_CACHE_BYTES)
        return {**args, **self.engine_args}


_NOT_PASSED = frozenset({"lora", "max_lora_rank", "chat_template", "engine_args"})


def _check_engine_args(where: str, args: Mapping[str, Any], options: list[str]) -> None:
    for name in args:
        if name in options:
            raise ConfigurationError(f"{where}: engine_args.{name} is an option of its own; write options.{name}")
        if name in _OURS:
            raise ConfigurationError(f"{where}: engine_args.{name} is set by Batchmill itself; leave it out")


def _whole(least: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if fits else f"a whole number of at least {least}"

    return check


def _share(value: Any) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return None if fits else "a number above 0 and at most 1"


def _gigabytes(value: Any) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    return None if fits else "a number of GiB of at least 0"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a text"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _one_of(choices: tuple[str, ...]) -> Callable[[Any], str | None]:
    return lambda value: None if value in choices else f"one of {', '.join(choices)}"


def _adapters(value: Any) -> str | None:
    fits = isinstance(value, Mapping) and all(name and isinstance(path, str) and path for name, path in value.items())
    return None if fits else 'a table of names and sources, such as { sql = "adapters/sql" }'


def _table(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "a table"


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "max_model_len": _whole(1),
    "gpu_memory_utilization": _share,
    "kv_cache_memory_bytes": _whole(1),
    "quantization": _text,
    "tensor_parallel_size": _whole(1),
    "dtype": _one_of(_DTYPES),
    "enforce_eager": _flag,
    "enable_prefix_caching": _flag,
    "max_num_seqs": _whole(1),
    "max_num_batched_tokens": _whole(1),
    "kv_cache_dtype": _text,
    "cpu_offload_gb": _gigabytes,
    "lora": _adapters,
    "max_lora_rank": _whole(1),
    "chat_template": _text,
    "trust_remote_code": _flag,
    "seed": _whole(0),
    "runner": _one_of(_RUNNERS),
    "engine_args": _table,
}
