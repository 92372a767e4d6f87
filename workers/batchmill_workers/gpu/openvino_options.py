"""What a catalogue entry may say under ``options`` for the OpenVINO engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

_PRECISIONS = ("f32", "f16", "bf16", "u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions:
    """Settings of the continuous batching scheduler and of the device.

    The key-value cache is f32 on the processor: OpenVINO's default there, u8, made 13 of 48 greedy answers of
    SmolLM2 depend on what else was in the batch, and f16 made one; f32 none, at the same tokens per second and four
    times the cache's memory. ``cache_gb`` 0 lets it grow as rows need it. Prefix caching is off because a shared
    prefix is then computed once with one batch's rounding. ``threads`` 0 takes OMP_NUM_THREADS, else all cores.
    """

    capacity_rows: int = 64
    max_batched_tokens: int = 256
    cache_gb: int = 0
    prefix_caching: bool = False
    split_prompts: bool = True
    kv_cache_precision: str = "f32"
    inference_precision: str = "f32"
    threads: int = 0
    chat_template: str = ""
    guided: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> OpenVinoOptions:
        """Raises ConfigurationError naming the option that is unknown or has the wrong kind of value."""
        where = f"[models.{model}] options"
        defaults = {f.name: f.default for f in fields(cls)}
        for name, value in options.items():
            if name not in defaults:
                raise ConfigurationError(f"{where}: {name!r} is not an option of openvino{nearest(name, defaults)}")
            _check(where, name, value, defaults[name])
        return cls(**options)


def _check(where: str, name: str, value: Any, default: Any) -> None:
    if type(value) is not type(default):
        raise ConfigurationError(f"{where}: {name} is {value!r}; it must be a {type(default).__name__}")
    if name.endswith("_precision") and value not in _PRECISIONS:
        raise ConfigurationError(f"{where}: {name} is {value!r}; it must be one of {', '.join(_PRECISIONS)}")
    least = 1 if name in {"capacity_rows", "max_batched_tokens"} else 0
    if isinstance(value, int) and value < least:
        raise ConfigurationError(f"{where}: {name} is {value}; it must be at least {least}")
