"""How much memory a model will need on its device: weights by the sizes of its files, a row's KV cache by its shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill_core.catalog import ModelEntry

from .context import read_config, text_config
from .gguf import read_metadata

# What a process needs before its model: libraries, the CUDA context, room to compute in. Measured with SmolLM2 by
# OpenVINO on a processor (400 MiB beside 93 MiB of weights); a CUDA context with its libraries takes about as much.
_RUNTIME_BYTES = 300 << 20
_ROW_TOKENS = 4096  # of a row, for engines whose cache grows as rows need it: few rows fill a long context
_BYTES = {"float32": 4, "float": 4, "f32": 4, "float16": 2, "half": 2, "f16": 2, "bfloat16": 2, "bf16": 2, "u8": 1}
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Elements that a token leaves in the KV cache, summed over layers; some layers keep the last tokens alone."""

    elements: int = 0
    window_elements: int = 0
    window_tokens: int = 0

    def row_elements(self, tokens: int) -> int:
        return self.elements * tokens + self.window_elements * min(tokens, self.window_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that a model needs on a device, with one row of ``row_tokens`` tokens at the least."""

    weights: int
    row: int
    row_tokens: int
    runtime: int = _RUNTIME_BYTES

    @property
    def least(self) -> int:
        return self.weights + self.row + self.runtime

    def rows_in(self, free_bytes: int) -> int | None:
        """How many rows of that length fit beside the weights; None where rows leave nothing behind."""
        return max(0, free_bytes - self.weights - self.runtime) // self.row if self.row else None


def needs_of(entry: ModelEntry, path: Path, *, device: str) -> Needs:
    """The estimate for a catalogue entry whose files lie at ``path``; reads their sizes and headers alone."""
    shape, context, stored = _of_folder(path) if path.is_dir() else _of_gguf(path)
    loaded = _loaded_bytes(entry, device, stored)
    tokens = _row_tokens(entry, context)
    weights = weights_bytes(path)
    return Needs(
        weights=weights * loaded // stored if stored else weights,
        row=shape.row_elements(tokens) * _cache_bytes(entry, loaded or 2),
        row_tokens=tokens,
    )


def weights_bytes(path: Path) -> int:
    """Size of the weights at ``path``: a file, or those of a folder in the first of the formats that engines prefer."""
    if path.is_file():
        return path.stat().st_size
    if (index := path / "model.safetensors.index.json").is_file():
        names = set(_json(index).get("weight_map", {}).values())
        return sum((path / str(name)).stat().st_size for name in names if (path / str(name)).is_file())
    for pattern in ("model*.safetensors", "*.safetensors", "*.gguf", "pytorch_model*.bin", "*.bin"):
        if sizes := [one.stat().st_size for one in path.glob(pattern)]:
            return sum(sizes)
    return 0


def cache_of_config(config: Mapping[str, Any]) -> CacheShape:
    """From the keys of a config.json. Nothing for a model that does not generate: it keeps no cache.

    Two tensors (keys, values) per layer, of ``num_key_value_heads`` times ``head_dim`` elements per token; with latent
    attention one of ``kv_lora_rank + qk_rope_head_dim``.
    """
    if not any(name.endswith(_GENERATES) for name in map(str, config.get("architectures") or ())):
        return CacheShape()
    layers = _first(config, "num_hidden_layers", "n_layer")
    heads = _first(config, "num_attention_heads", "n_head")
    width = _first(config, "head_dim") or _first(config, "hidden_size", "n_embd") // max(1, heads)
    per_layer = 2 * (_first(config, "num_key_value_heads", "num_kv_heads") or heads) * width
    if rank := _first(config, "kv_lora_rank"):
        per_layer = rank + _first(config, "qk_rope_head_dim")
    kinds, window = config.get("layer_types"), _first(config, "sliding_window")
    if not isinstance(kinds, list):
        return CacheShape(elements=layers * per_layer)
    return CacheShape(
        elements=kinds.count("full_attention") * per_layer,
        window_elements=kinds.count("sliding_attention") * per_layer,
        window_tokens=window,
    )


def cache_of_gguf(metadata: Mapping[str, Any]) -> CacheShape:
    """From a GGUF file's metadata; ``attention.head_count_kv`` is one number, or one for each layer."""
    heads = metadata.get("attention.head_count", 0)
    heads = max(heads) if isinstance(heads, list) else heads
    per_layer = metadata.get("attention.head_count_kv", heads)
    kv_heads = sum(per_layer) if isinstance(per_layer, list) else per_layer * metadata.get("block_count", 0)
    width = metadata.get("embedding_length", 0) // max(1, heads)
    keys = metadata.get("attention.key_length", width)
    return CacheShape(elements=kv_heads * (keys + metadata.get("attention.value_length", width)))


def _of_folder(path: Path) -> tuple[CacheShape, int, int]:
    config = text_config(path)
    kind = str(config.get("dtype") or config.get("torch_dtype"))
    quantised = "quantization_config" in read_config(path)
    return (
        cache_of_config(config),
        _first(config, "max_position_embeddings", "n_positions"),
        0 if quantised else _BYTES.get(kind, 0),
    )


def _of_gguf(path: Path) -> tuple[CacheShape, int, int]:
    metadata = read_metadata(path)
    return cache_of_gguf(metadata), _first(metadata, "context_length"), 0


def _loaded_bytes(entry: ModelEntry, device: str, stored: int) -> int:
    """Bytes per weight as it is loaded; 0 where files do not say how it is stored."""
    asked = _BYTES.get(str(entry.options.get("dtype", "auto")))
    if not stored or asked:
        return asked or 0
    if entry.engine == "transformers":
        return 4 if device == "cpu" else 2
    return stored if device == "cpu" else 2  # vLLM turns float32 into float16


def _cache_bytes(entry: ModelEntry, loaded: int) -> int:
    if entry.engine == "openvino":
        return _BYTES.get(str(entry.options.get("kv_cache_precision", "f32")), 4)
    kind = str(entry.options.get("kv_cache_dtype", "auto"))
    return 1 if kind.startswith(("fp8", "int8")) else _BYTES.get(kind, loaded)


def _row_tokens(entry: ModelEntry, context: int) -> int:
    """vLLM refuses to start unless one row of the whole context fits; the others let their cache grow."""
    asked = entry.options.get("max_model_len") or entry.context_tokens or context
    tokens = asked if isinstance(asked, int) and asked > 0 else _ROW_TOKENS
    return tokens if entry.engine == "vllm" else min(tokens, _ROW_TOKENS)


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := config.get(name), int) and value > 0), 0)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
