"""What a catalogue entry may say under ``options`` for the OpenVINO engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from .engine_options import CHECK_MEMORY, FLAG, TEXT, one_of, parse_options, whole

_PRECISION = one_of("f32", "f16", "bf16", "u8")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoOptions:
    """Settings of the continuous batching scheduler and of the device.

    ``capacity_rows`` 0 takes as many as memory has room for, ``cache_gb`` 0 half of what is free: see
    ``openvino.by_memory``. A step must have room for a token of each row and for prompts beside: ``max_batched_tokens``.

    The key-value cache is f32 on the processor: OpenVINO's default there, u8, made 13 of 48 greedy answers of
    SmolLM2 depend on what else was in the batch, and f16 made one; f32 none, at the same tokens per second and four
    times the cache's memory. A prefix that prompts share is computed
    once: 48 greedy answers with prefixes of 250 tokens were the same together in any order, alone, and without that
    cache; see ``openvino_line``. It keeps no more memory than the rows needed at their peak. ``threads`` 0 takes
    OMP_NUM_THREADS, else all cores.

    ``dynamic_quantization`` rounds what a layer of quantised weights is fed to 8 bits where the processor multiplies
    such numbers (AVX-512 VNNI): twice the tokens per second, but how it rounds depends on the batch. On such a processor
    12 of 24 greedy answers were the same together and alone with it, and all without; others do not have it.
    """

    capacity_rows: Annotated[int, whole(0)] = 0
    max_batched_tokens: Annotated[int, whole(1)] = 512
    cache_gb: Annotated[int, whole(0)] = 0
    prefix_caching: Annotated[bool, FLAG] = True
    split_prompts: Annotated[bool, FLAG] = True
    kv_cache_precision: Annotated[str, _PRECISION] = "f32"
    inference_precision: Annotated[str, _PRECISION] = "f32"
    dynamic_quantization: Annotated[bool, FLAG] = True
    threads: Annotated[int, whole(0)] = 0
    chat_template: Annotated[str, TEXT] = ""
    guided: Annotated[bool, FLAG] = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> OpenVinoOptions:
        """Raises ConfigurationError naming the option that is unknown or has a wrong value."""
        return parse_options(cls, options, engine="openvino", model=model, beside=[CHECK_MEMORY])
