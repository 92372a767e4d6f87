"""Whether a model fits its device: estimated from its files, compared with what the driver says, told in a sentence."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu import fit
from batchmill_workers.gpu.device_memory import DeviceMemory, parse_parts
from batchmill_workers.gpu.model_memory import Needs, cache_of_config, cache_of_gguf, needs_of, weights_bytes
from batchmill_workers.gpu.sources import resolve_source
from tests.conformance.engine_host import SMOLLM2

MIB = 1 << 20
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
# As nvidia-smi of a host with two L4 answers; GPU 0 is half taken, GPU 1 is free.
SMI = """#!/bin/sh
case "$1" in
-L) echo 'GPU 0: NVIDIA L4 (UUID: GPU-aaa)'; echo 'GPU 1: NVIDIA L4 (UUID: GPU-bbb)' ;;
--query-gpu=index,uuid,name,memory.total) echo '0, GPU-aaa, NVIDIA L4, 23034'; echo '1, GPU-bbb, NVIDIA L4, 23034' ;;
--query-gpu=index,uuid,memory.total,memory.free) echo '0, GPU-aaa, 23034, 10034'; echo '1, GPU-bbb, 23034, 22600' ;;
--query-compute-apps=*) echo 'GPU-aaa, 4711, 9000'; echo 'GPU-aaa, 4712, [N/A]' ;;
*) exit 2 ;;
esac
"""
MIG_XML = """<nvidia_smi_log><gpu id="0"><mig_devices><mig_device><index>1</index><fb_memory_usage>
<total>20096 MiB</total><free>20070 MiB</free></fb_memory_usage></mig_device></mig_devices></gpu></nvidia_smi_log>"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded nvidia-smi, ahead on the PATH."""
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def model(folder: Path, mib: int, engine: str = "transformers", **options: Any) -> ModelEntry:
    """A folder with a config and weights of that size, of which nothing is on the disk."""
    source = folder / f"model-{mib}"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA))
    with (source / "model.safetensors").open("wb") as file:
        file.truncate(mib * MIB)
    return ModelEntry(name="llama", engine=engine, source=str(source), options=options)


class Clock:
    """Waiting moves it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


def check(entry: ModelEntry, devices: str) -> None:
    clock = Clock()
    fit.check_fit(entry, "cuda:0", environment={"CUDA_VISIBLE_DEVICES": devices}, sleep=clock.sleep, clock=clock)


def test_a_gpu_that_is_lost_keeps_no_slot_of_another_from_starting_again(
    smi: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = "#!/bin/sh\necho 'Unable to determine the device handle for GPU0: GPU is lost.'\nexit 15\n"
    (tmp_path / "bin" / "nvidia-smi").write_text(lost)

    check(model(tmp_path, 20_000), "GPU-bbb")

    (told,) = [r.getMessage() for r in caplog.records]
    assert "gpu_memory_not_checked devices=GPU-bbb" in told
    assert "GPU is lost" in told


def test_a_token_leaves_keys_and_values_in_every_layer() -> None:
    assert cache_of_config(LLAMA).row_elements(1) == 2 * 32 * 8 * 128


def test_layers_that_keep_a_window_stop_growing() -> None:
    layers = ["full_attention", "sliding_attention", "sliding_attention", "linear_attention"]
    cache = cache_of_config({**LLAMA, "layer_types": layers, "sliding_window": 100})

    assert cache.row_elements(1000) == 2 * 8 * 128 * (1000 + 2 * 100)


def test_a_model_that_does_not_generate_keeps_no_cache() -> None:
    assert cache_of_config({**LLAMA, "architectures": ["BertModel"]}).row_elements(512) == 0


def test_latent_attention_keeps_one_tensor() -> None:
    cache = cache_of_config({**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64})

    assert cache.row_elements(1) == 32 * (512 + 64)


def test_a_gguf_file_may_name_the_heads_of_each_layer() -> None:
    shape = {"block_count": 2, "attention.head_count": 8, "embedding_length": 64, "attention.head_count_kv": [4, 2]}

    assert cache_of_gguf(shape).row_elements(1) == (4 + 2) * 2 * 8


def test_the_packaged_model_is_estimated_from_its_header() -> None:
    assert SMOLLM2.source is not None
    path = resolve_source(SMOLLM2.source)
    needs = needs_of(SMOLLM2, path, device="cpu")

    assert needs.weights == path.stat().st_size
    assert needs.row == 2 * 30 * 3 * 64 * 4 * needs.row_tokens


def test_weights_are_counted_once_where_a_folder_has_them_twice(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    (tmp_path / "one.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "consolidated.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 10)

    assert weights_bytes(tmp_path) == 10


def test_weights_grow_where_they_are_loaded_wider_than_stored(tmp_path: Path) -> None:
    entry = model(tmp_path, 100)
    path = resolve_source(str(entry.source))

    assert needs_of(entry, path, device="cpu").weights == 200 * MIB
    assert needs_of(entry, path, device="cuda:0").weights == 100 * MIB


@pytest.mark.usefixtures("smi")
def test_a_device_that_others_hold_names_their_processes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check(model(tmp_path, 15_000), "GPU-aaa")

    said = str(refused.value)
    assert "model llama needs about 15812 MiB (weights 15000, KV cache of one row of 4096 tokens 512" in said
    assert "device 0 (NVIDIA L4) is busy: 10034 of 23034 MiB are free" in said
    assert "processes 4711 (9000 MiB), 4712 hold the rest; end them, or use another device" in said


@pytest.mark.usefixtures("smi")
def test_a_device_that_is_too_small_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"device 1 \(NVIDIA L4\) is too small: it has 23034 MiB"):
        check(model(tmp_path, 30_000), "GPU-bbb")


@pytest.mark.usefixtures("smi")
def test_a_device_that_is_missing_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"device GPU-zzz of this worker is missing: .*0 \(GPU-aaa\)"):
        check(model(tmp_path, 10), "GPU-zzz")


@pytest.mark.usefixtures("smi")
def test_what_fits_is_let_in(tmp_path: Path) -> None:
    check(model(tmp_path, 15_000), "GPU-bbb")


@pytest.mark.usefixtures("smi")
def test_vllm_needs_its_whole_share_of_the_device_free(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs about 20731 MiB.* is busy"):
        check(model(tmp_path, 4000, engine="vllm"), "GPU-aaa")


def test_a_model_over_two_devices_needs_half_of_itself_on_each() -> None:
    entry = ModelEntry(name="m", engine="vllm", options={"gpu_memory_utilization": 0.5})
    needs = Needs(weights=20_000 * MIB, row=0, row_tokens=1, runtime=0)
    halves = [
        DeviceMemory(name=f"device {n}", total_bytes=22_000 * MIB, free_bytes=22_000 * MIB, gpu=True) for n in (0, 1)
    ]

    assert fit.misfit(entry, needs, halves) is None
    assert "too small" in str(fit.misfit(entry, needs, halves[:1]))


def test_the_parts_of_a_divided_gpu_have_memory_of_their_own() -> None:
    assert parse_parts(MIG_XML) == {"0.1": (20096 * MIB, 20070 * MIB)}


LOAD = """
import asyncio
from batchmill_workers.local_lane import LocalLane
from dataclasses import replace
from tests.conformance.engine_host import SMOLLM2
asyncio.run(LocalLane(replace(SMOLLM2, engine="openvino", options={OPTIONS}), "cpu").start())
"""


def test_a_real_model_under_a_memory_limit_that_is_too_small_is_refused_before_loading() -> None:
    limit = 400 * MIB
    command = [sys.executable, "-c", LOAD.replace("{OPTIONS}", "{}")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),  # no threads here
    )

    assert done.returncode != 0
    assert "a process under ulimit -v is too small: it has 400 MiB" in done.stderr


def test_the_check_can_be_left_out_and_engines_never_hear_of_it() -> None:
    entry, checked = fit.without_check(
        ModelEntry(name="m", engine="vllm", options={"check_memory": False, "dtype": "auto"})
    )

    assert not checked
    assert entry.options == {"dtype": "auto"}


def test_a_check_that_is_no_flag_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="check_memory is 'no'; it must be true or false"):
        fit.without_check(ModelEntry(name="m", engine="vllm", options={"check_memory": "no"}))


def test_engines_whose_use_of_memory_nobody_knows_are_not_checked_and_keep_their_options() -> None:
    entry = ModelEntry(name="m", engine="server", source="x", options={"command": "serve"})

    assert fit.without_check(entry) == (entry, False)
