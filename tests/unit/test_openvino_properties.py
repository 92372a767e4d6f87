"""What OpenVINO is told of the processor, by an entry's options."""

from __future__ import annotations

import pytest

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
