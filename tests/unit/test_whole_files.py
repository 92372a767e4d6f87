"""A file of weights that ends too early is told before a library crashes on it."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.gguf import _BLOCKS, architecture, least_size
from batchmill_workers.gpu.openvino import OpenVinoEngine
from batchmill_workers.gpu.sources import resolve_source
from batchmill_workers.gpu.whole_files import cut_short
from tests.conformance.engine_host import SMOLLM2

HEADER = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
WHOLE = struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 12


@pytest.fixture
def weights() -> Path:
    return resolve_source(str(SMOLLM2.source))


def test_a_real_gguf_file_ends_where_its_last_tensor_does(weights: Path) -> None:
    assert least_size(weights) == weights.stat().st_size
    assert cut_short(weights) is None
    assert architecture(weights) == "llama"


@pytest.mark.parametrize("kept", [3000, 1_000_000, -1])
def test_a_gguf_file_that_is_cut_anywhere_is_told(weights: Path, kept: int, tmp_path: Path) -> None:
    cut = tmp_path / "m.gguf"
    cut.write_bytes(weights.read_bytes()[:kept])

    said = cut_short(cut)

    assert said is not None
    assert said.startswith(f"m.gguf is cut short: it has {cut.stat().st_size} bytes of at least ")


def test_the_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {kind.value: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}

    assert {kind: theirs[kind] for kind in _BLOCKS} == _BLOCKS


def test_safetensors_are_whole_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE)
    whole = cut_short(tmp_path)
    cuts = []
    for kept in (0, 5, 8, 40, len(WHOLE) - 1):
        path.write_bytes(WHOLE[:kept])
        cuts.append(cut_short(tmp_path))

    assert whole is None
    assert all(said and said.startswith("model.safetensors is cut short") for said in cuts)


@pytest.mark.parametrize(
    "content", [b"\xff" * 9, b"\2\0\0\0\0\0\0\0[]", b'\7\0\0\0\0\0\0\0{"a":1}', b"\2\0\0\0\0\0\0\0??"]
)
def test_what_is_no_file_of_weights_is_left_to_its_library(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "m.bin").write_bytes(content)

    assert cut_short(tmp_path) is None
    assert cut_short(tmp_path / "m.bin") is None
    assert cut_short(tmp_path / "gone.gguf") is None


@pytest.mark.parametrize(
    ("content", "instead"), [(b"", "it is empty"), (b"<html>Not found", "it begins with b'<html>Not found'")]
)
def test_a_page_or_nothing_in_place_of_a_gguf_file_is_told(content: bytes, instead: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)

    assert cut_short(tmp_path / "m.gguf") == f"m.gguf is no GGUF file: {instead}; fetch it again"


@pytest.mark.parametrize("name", ["m.gguf", "model.safetensors"])
def test_a_pointer_of_git_lfs_in_place_of_weights_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")

    said = cut_short(path if name == "m.gguf" else tmp_path)
    assert said == f"{name} is a pointer of Git LFS in place of the file; `git lfs pull` in its folder fetches it"


def test_a_model_that_is_cut_short_starts_no_process(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(weights.read_bytes()[:1_000_000])
    engine = OpenVinoEngine(model=ModelEntry(name="m", engine="openvino", source=str(tmp_path / "m.gguf")))

    with pytest.raises(ConfigurationError, match=r"^model m cannot be loaded from .*m\.gguf: m\.gguf is cut short"):
        asyncio.run(engine.start())


def test_a_gguf_file_of_another_architecture_is_told_as_such(weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(weights.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0gemma", 1))
    engine = OpenVinoEngine(model=ModelEntry(name="m", engine="openvino", source=str(path)))

    with pytest.raises(ConfigurationError, match=r"architecture 'gemma', which OpenVINO GenAI may not read from GGUF"):
        asyncio.run(engine.start())
