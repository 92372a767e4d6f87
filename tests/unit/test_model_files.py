"""Whatever stands in a model's files, what is read from them before loading is a number or nothing, and no error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchmill_core.catalog import ModelEntry
from batchmill_workers.gpu.context import context_tokens
from batchmill_workers.gpu.gguf import read_metadata
from batchmill_workers.gpu.model_memory import needs_of, weights_bytes
from batchmill_workers.gpu.whole_files import cut_short

CONFIG_KEYS = (
    "architectures", "num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size", "num_key_value_heads",
    "layer_types", "sliding_window", "kv_lora_rank", "max_position_embeddings", "n_positions", "dtype", "text_config",
    "quantization_config",
)  # fmt: skip
GGUF_KEYS = (
    "llama.block_count", "llama.context_length", "llama.attention.head_count", "llama.attention.head_count_kv",
    "llama.embedding_length", "llama.attention.key_length", "general.name", "general.alignment", "tokenizer.ggml.model", "odd", "",
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("LlamaForCausalLM"),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(CONFIG_KEYS), one, max_size=3),
    max_leaves=5,
)
whole = st.integers(0, 2**64 - 1)
scalars = (
    st.tuples(st.just(4), st.integers(0, 2**32 - 1).map(lambda n: struct.pack("<I", n)))
    | st.tuples(st.just(10), whole.map(lambda n: struct.pack("<Q", n)))
    | st.tuples(st.just(6), st.floats(width=32).map(lambda x: struct.pack("<f", x)))
    | st.tuples(st.just(7), st.just(b"\1"))
    | st.tuples(st.just(5), st.just(struct.pack("<i", -3)))
)
arrays = st.lists(st.integers(0, 99), max_size=3).map(
    lambda ns: (9, struct.pack("<IQ", 4, len(ns)) + struct.pack(f"<{len(ns)}I", *ns))
)
odd = st.tuples(st.sampled_from([8, 9, 99]), st.binary(max_size=24))
entries = st.lists(st.tuples(st.sampled_from(GGUF_KEYS), scalars | arrays | odd), max_size=6)
fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def gguf(path: Path, entries: list[tuple[str, tuple[int, bytes]]], *, cut: int = 0) -> Path:
    body = b"".join(
        struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value
        for name, (kind, value) in entries
    )
    whole = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body
    path.write_bytes(whole[: len(whole) - cut])
    return path


def sized(path: Path) -> tuple[int | None, int, int]:
    context = context_tokens(path)
    needs = needs_of(ModelEntry(name="m", engine="openvino", source=str(path)), path, device="cpu")
    assert context is None or context > 0
    assert (cut_short(path) or f"{path.name} is").startswith(f"{path.name} is")
    assert needs.weights >= 0
    assert needs.row >= 0
    assert needs.row_tokens > 0
    return context, needs.weights, needs.row


@fuzz
@given(entries, st.integers(0, 30))
def test_any_gguf_header_is_read_or_left(tmp_path: Path, entries: list[Any], cut: int) -> None:
    path = gguf(tmp_path / "m.gguf", entries, cut=cut)

    assert sized(path)[1] == path.stat().st_size


@fuzz
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), values))
def test_any_config_is_read_or_left(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert sized(tmp_path)[1] == 0


@fuzz
@given(st.binary(max_size=64) | st.just(b"[" * 100_000))
def test_a_config_that_is_no_json_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)

    assert sized(tmp_path) == (None, 0, 0)


def test_a_gguf_file_of_lists_in_lists_is_left(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 20_000

    assert read_metadata(gguf(tmp_path / "m.gguf", [("llama.odd", (9, nested))])) == {}


@pytest.mark.parametrize("placed", [{"a": "model-1.safetensors", "b": "gone.safetensors", "c": 7}, ["a"], None])
def test_weights_that_are_gone_weigh_nothing(tmp_path: Path, placed: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (tmp_path / "model-1.safetensors").write_bytes(b"1234")
    (tmp_path / "model-2.safetensors").symlink_to(tmp_path / "blob-that-was-cleared")

    assert weights_bytes(tmp_path) == 4


def test_a_context_of_no_tokens_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": -1}')
    first = context_tokens(tmp_path)
    (tmp_path / "config.json").write_text('{"n_positions": 1024}')

    assert (first, context_tokens(tmp_path)) == (None, 1024)
