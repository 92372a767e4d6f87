"""What a catalogue entry may say under ``options`` for the transformers engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from .engine_options import CHECK_MEMORY, FLAG, TEXT, one_of, parse_options, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """How a model is loaded and batched.

    ``task`` auto looks into the model's files. ``dtype`` auto is float32 on the processor, on a GPU bfloat16 where it
    can, else float16. ``max_rows`` bounds a batch's rows (0: 64 on the processor, 256 on a GPU), ``max_batch_tokens``
    its rows times their padded length (0: found by trying). ``max_wait_ms`` is how long the oldest row waits for others
    to fill its batch. ``truncate`` cuts a text that is too long for an embedding or a classification, which otherwise
    ends as too_long. ``threads`` 0 takes OMP_NUM_THREADS, else all cores.
    """

    task: Annotated[str, one_of("auto", "chat", "embed", "classify")] = "auto"
    dtype: Annotated[str, one_of("auto", "float32", "bfloat16", "float16")] = "auto"
    attention: Annotated[str, one_of("auto", "eager", "sdpa", "flash_attention_2")] = "auto"
    max_rows: Annotated[int, whole(0)] = 0
    max_batch_tokens: Annotated[int, whole(0)] = 0
    max_wait_ms: Annotated[int, whole(0)] = 50
    truncate: Annotated[bool, FLAG] = False
    chat_template: Annotated[str, TEXT] = ""
    guided: Annotated[bool, FLAG] = True
    threads: Annotated[int, whole(0)] = 0
    trust_remote_code: Annotated[bool, FLAG] = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self, device: str) -> int:
        """The most rows of one batch on this device."""
        return self.max_rows or (64 if device == "cpu" else 256)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> TransformersOptions:
        """Raises ConfigurationError naming the option that is unknown or has a wrong value."""
        return parse_options(cls, options, engine="transformers", model=model, beside=[CHECK_MEMORY])
