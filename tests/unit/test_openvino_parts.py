"""The pure parts of the OpenVINO engine: options, devices, contexts, frames and errors in words."""

from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.context import context_tokens
from batchmill_workers.gpu.frames import Channel, encode
from batchmill_workers.gpu.openvino import OpenVinoEngine, openvino_device
from batchmill_workers.gpu.openvino_generation import reason
from batchmill_workers.gpu.openvino_options import OpenVinoOptions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_gbb": 1}, "'cache_gbb' is not an option of openvino; did you mean 'cache_gb'?"),
        ({"capacity_rows": -1}, "capacity_rows is -1; it must be a whole number of at least 0"),
        ({"capacity_rows": "64"}, "capacity_rows is '64'; it must be a whole number of at least 0"),
        ({"prefix_caching": 1}, "prefix_caching is 1; it must be true or false"),
        ({"kv_cache_precision": "f64"}, "must be one of f32, f16, bf16, u8"),
    ],
)
def test_a_wrong_option_is_named_with_its_model(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        OpenVinoOptions.parse(options, model="m")

    assert "[models.m] options" in str(refused.value)
    assert said in str(refused.value)


def test_capacity_follows_from_the_options() -> None:
    engine = OpenVinoEngine(model=ModelEntry(name="m", source="x", options={"capacity_rows": 5}))

    assert engine.capacity_rows == 5


@pytest.mark.parametrize(("device", "name"), [("cpu", "CPU"), ("gpu", "GPU"), ("gpu:1", "GPU.1")])
def test_a_device_has_openvinos_name(device: str, name: str) -> None:
    assert openvino_device(device, model="m") == name


def test_a_cuda_device_is_refused_with_the_engine_to_use() -> None:
    with pytest.raises(ConfigurationError, match="engine vllm"):
        OpenVinoEngine(model=ModelEntry(name="m", source="x"), device="cuda:0")


def gguf(path: Path, *entries: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return path


def gguf_key(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_the_context_of_a_gguf_file_is_read_from_its_header(tmp_path: Path) -> None:
    path = gguf(
        tmp_path / "m.gguf",
        gguf_key("general.name", 8, gguf_text("tiny")),
        gguf_key("tokens", 9, struct.pack("<IQ", 8, 2) + gguf_text("a") + gguf_text("bc")),
        gguf_key("scores", 9, struct.pack("<IQ", 6, 2) + struct.pack("<ff", 0.5, 1.5)),
        gguf_key("llama.context_length", 4, struct.pack("<I", 8192)),
    )

    assert context_tokens(path) == 8192


@pytest.mark.parametrize("content", [b"", b"GGUF\x03", b"PK\x03\x04 a zip file", b"GGUF" + b"\xff" * 40])
def test_a_file_that_is_no_whole_gguf_has_no_known_context(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    assert context_tokens(path) is None


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"text_config": {"max_position_embeddings": 32768}}, 32768),
        ({"model_type": "llama"}, None),
        ([], None),
    ],
)
def test_the_context_of_a_folder_is_in_its_config(tmp_path: Path, config: object, tokens: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert context_tokens(tmp_path) == tokens


def test_a_folder_without_a_config_has_no_known_context(tmp_path: Path) -> None:
    assert context_tokens(tmp_path) is None


def test_frames_arrive_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        data = encode({"id": 1, "text": "ü" * 10}) + encode({"id": 2})
        ours.sendall(data[:7])
        before = channel.receive(wait=False)
        ours.sendall(data[7:])

        assert before == []
        assert [frame["id"] for frame in channel.receive(wait=True)] == [1, 2]


def test_a_closed_channel_ends_the_wait() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()

        with pytest.raises(EOFError):
            Channel(theirs).receive(wait=True)


def test_an_error_of_openvino_is_told_without_its_builders_paths() -> None:
    error = RuntimeError("Check 'x > 0' failed at /build/a.cpp:3:\n'max_new_tokens' must be greater than 0\n\n")

    assert reason(error) == "'max_new_tokens' must be greater than 0"
    assert reason(ValueError()) == "ValueError"
    assert "openvino_genai" not in sys.modules
