"""What OpenVINO is told of the processor, by an entry's options and by the host's memory."""

from __future__ import annotations

import pytest

from batchmill_workers.gpu.device_memory import DeviceMemory
from batchmill_workers.gpu.model_memory import Needs
from batchmill_workers.gpu.openvino import rows_by_memory
from batchmill_workers.gpu.openvino_loading import device_properties
from batchmill_workers.gpu.openvino_options import OpenVinoOptions


def test_rounding_to_8_bits_is_left_to_openvino_unless_it_is_off() -> None:
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE" not in device_properties(OpenVinoOptions(), "CPU")
    without = OpenVinoOptions(dynamic_quantization=False)
    assert device_properties(without, "CPU")["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == 0


def test_threads_are_those_of_the_entry_before_those_of_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    assert device_properties(OpenVinoOptions(), "CPU")["INFERENCE_NUM_THREADS"] == 3
    assert device_properties(OpenVinoOptions(threads=2), "CPU")["INFERENCE_NUM_THREADS"] == 2


def test_a_gpu_is_told_nothing_that_only_processors_know() -> None:
    assert device_properties(OpenVinoOptions(dynamic_quantization=False), "GPU.0") == {}


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_gib", "rows"),
    [
        (80, 128),  # more than that make rows slower, and nothing faster
        (16, 28),  # (16 - 2) / 2 GiB for the cache, 256 MiB for 1024 tokens
        (2, 8),  # less than the weights need: that is told by the check of memory, not here
    ],
)
def test_rows_side_by_side_follow_from_the_memory_that_the_weights_leave(free_gib: int, rows: int) -> None:
    needs = Needs(weights=2 * GIB, row=GIB, row_tokens=4096, runtime=0)
    memory = DeviceMemory(name="this host", total_bytes=free_gib * GIB, free_bytes=free_gib * GIB)

    assert rows_by_memory(needs, memory) == rows


def test_without_knowing_the_memory_or_the_cache_the_most_rows_are_taken() -> None:
    needs = Needs(weights=GIB, row=0, row_tokens=4096)
    memory = DeviceMemory(name="this host", total_bytes=GIB, free_bytes=GIB)

    assert rows_by_memory(needs, memory) == 128
    assert rows_by_memory(Needs(weights=GIB, row=1, row_tokens=1), None) == 128
