"""What a catalogue entry may say under ``options`` for the transformers engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

_CHOICES = {
    "task": ("auto", "chat", "embed", "classify"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "eager", "sdpa", "flash_attention_2"),
}
_LEAST = {"max_rows": 0, "max_batch_tokens": 0, "max_wait_ms": 0, "threads": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """How a model is loaded and batched.

    ``task`` auto looks into the model's files. ``dtype`` auto is float32 on the processor, on a GPU bfloat16 where it
    can, else float16. ``max_rows`` bounds a batch's rows (0: 64 on the processor, 256 on a GPU), ``max_batch_tokens``
    its rows times their padded length (0: found by trying). ``max_wait_ms`` is how long the oldest row waits for others
    to fill its batch. ``truncate`` cuts a text that is too long for an embedding or a classification, which otherwise
    ends as too_long. ``threads`` 0 takes OMP_NUM_THREADS, else all cores.
    """

    task: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    max_rows: int = 0
    max_batch_tokens: int = 0
    max_wait_ms: int = 50
    truncate: bool = False
    chat_template: str = ""
    guided: bool = True
    threads: int = 0
    trust_remote_code: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self, device: str) -> int:
        """The most rows of one batch on this device."""
        return self.max_rows or (64 if device == "cpu" else 256)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> TransformersOptions:
        """Raises ConfigurationError naming the option that is unknown or has the wrong kind of value."""
        where = f"[models.{model}] options"
        defaults = {f.name: f.default for f in fields(cls)}
        for name, value in options.items():
            if name not in defaults:
                raise ConfigurationError(f"{where}: {name!r} is not an option of transformers{nearest(name, defaults)}")
            _check(where, name, value, defaults[name])
        return cls(**options)


def _check(where: str, name: str, value: Any, default: Any) -> None:
    if type(value) is not type(default):
        raise ConfigurationError(f"{where}: {name} is {value!r}; it must be a {type(default).__name__}")
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise ConfigurationError(f"{where}: {name} is {value!r}; it must be one of {', '.join(choices)}")
    if name in _LEAST and value < _LEAST[name]:
        raise ConfigurationError(f"{where}: {name} is {value}; it must be at least {_LEAST[name]}")
