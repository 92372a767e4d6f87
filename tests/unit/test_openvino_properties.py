"""What OpenVINO is told of the processor, by an entry's options and by the host's memory."""

from __future__ import annotations

import pytest

from batchmill_workers.gpu.device_memory import DeviceMemory
from batchmill_workers.gpu.model_memory import Needs
from batchmill_workers.gpu.openvino import by_memory
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
NEEDS = Needs(weights=2 * GIB, row=GIB, row_tokens=4096, runtime=0)


def host(free_gib: int) -> DeviceMemory:
    return DeviceMemory(name="this host", total_bytes=free_gib * GIB, free_bytes=free_gib * GIB)


@pytest.mark.parametrize(
    ("free_gib", "cache_gb", "rows"),
    [
        (80, 39, 128),  # more rows than that make each slower, and nothing faster
        (16, 7, 28),  # half of 14 GiB for the cache, 256 MiB for 1024 tokens
        (3, 1, 8),
        (1, 1, 8),  # less than the weights need: that is told by the check of memory, not here
    ],
)
def test_the_cache_and_its_rows_follow_from_the_memory_that_the_weights_leave(
    free_gib: int, cache_gb: int, rows: int
) -> None:
    options = by_memory(OpenVinoOptions(), NEEDS, host(free_gib))

    assert (options.cache_gb, options.capacity_rows) == (cache_gb, rows)


def test_what_the_entry_says_stays_and_the_rest_follows_from_it() -> None:
    assert by_memory(OpenVinoOptions(cache_gb=4), NEEDS, host(80)).capacity_rows == 16
    given = by_memory(OpenVinoOptions(capacity_rows=300), NEEDS, host(16))
    assert (given.cache_gb, given.capacity_rows) == (7, 300)


def test_without_knowing_the_memory_or_the_cache_the_most_rows_are_taken() -> None:
    no_cache = Needs(weights=GIB, row=0, row_tokens=4096)

    assert by_memory(OpenVinoOptions(), no_cache, host(1)).capacity_rows == 128
    unknown = by_memory(OpenVinoOptions(), NEEDS, None)
    assert (unknown.cache_gb, unknown.capacity_rows) == (0, 128)
