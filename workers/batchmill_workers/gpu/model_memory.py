"""How much memory a model will need on its device: weights by the sizes of its files, a row's KV cache by its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill_core.catalog import ModelEntry

from .context import first_whole, read_config, read_json, text_config
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
    if not path.is_dir():
        return _size(path)
    placed = read_json(path / "model.safetensors.index.json").get("weight_map")
    if isinstance(placed, dict):
        return sum(_size(path / name) for name in {one for one in placed.values() if isinstance(one, str)})
    for pattern in ("model*.safetensors", "*.safetensors", "*.gguf", "pytorch_model*.bin", "*.bin"):
        if size := sum(map(_size, path.glob(pattern))):
            return size
    return 0


def _size(path: Path) -> int:
    """0 for a file that is not there any more, or whose link leads nowhere, as in a hub's cache that was cleared."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def cache_of_config(config: Mapping[str, Any]) -> CacheShape:
    """From the keys of a config.json. Nothing for a model that does not generate: it keeps no cache.

    Two tensors (keys, values) per layer, of ``num_key_value_heads`` times ``head_dim`` elements per token; with latent
    attention one of ``kv_lora_rank + qk_rope_head_dim``.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(_GENERATES) for name in names):
        return CacheShape()
    layers = first_whole(config, "num_hidden_layers", "n_layer")
    heads = first_whole(config, "num_attention_heads", "n_head")
    width = first_whole(config, "head_dim") or first_whole(config, "hidden_size", "n_embd") // max(1, heads)
    per_layer = 2 * (first_whole(config, "num_key_value_heads", "num_kv_heads") or heads) * width
    if rank := first_whole(config, "kv_lora_rank"):
        per_layer = rank + first_whole(config, "qk_rope_head_dim")
    kinds, window = config.get("layer_types"), first_whole(config, "sliding_window")
    if not isinstance(kinds, list):
        return CacheShape(elements=layers * per_layer)
    return CacheShape(
        elements=kinds.count("full_attention") * per_layer,
        window_elements=kinds.count("sliding_attention") * per_layer,
        window_tokens=window,
    )


def cache_of_gguf(metadata: Mapping[str, Any]) -> CacheShape:
    """From a GGUF file's metadata; ``attention.head_count_kv`` is one number, or one for each layer."""
    heads = max(_per_layer(metadata, "attention.head_count"), default=0)
    per_layer = _per_layer(metadata, "attention.head_count_kv") or [heads]
    layers = first_whole(metadata, "block_count") if len(per_layer) == 1 else 1
    width = first_whole(metadata, "embedding_length") // max(1, heads)
    keys = first_whole(metadata, "attention.key_length") or width
    values = first_whole(metadata, "attention.value_length") or width
    return CacheShape(elements=sum(per_layer) * layers * (keys + values))


def _per_layer(metadata: Mapping[str, Any], name: str) -> list[int]:
    """One number that holds for all layers, or one for each; layers without attention have 0."""
    found = metadata.get(name)
    numbers = found if isinstance(found, list) else [found]
    return [one for one in numbers if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def _of_folder(path: Path) -> tuple[CacheShape, int, int]:
    config = text_config(path)
    kind = str(config.get("dtype") or config.get("torch_dtype"))
    quantised = "quantization_config" in read_config(path)
    return (
        cache_of_config(config),
        first_whole(config, "max_position_embeddings", "n_positions"),
        0 if quantised else _BYTES.get(kind, 0),
    )


def _of_gguf(path: Path) -> tuple[CacheShape, int, int]:
    metadata = read_metadata(path)
    return cache_of_gguf(metadata), first_whole(metadata, "context_length"), 0


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
