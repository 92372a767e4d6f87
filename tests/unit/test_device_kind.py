"""The name of a kind of device, under which batch sizes are remembered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchmill_workers.gpu.device_kind import device_kind, kind_of, kind_of_processor
from batchmill_workers.gpu.devices import Device

H200 = [Device(index=str(n), uuid=f"GPU-{n}", name="NVIDIA H200", memory_mib=143_771) for n in range(3)]
L4 = Device(index="3", uuid="GPU-3", name="NVIDIA L4", memory_mib=23_034)
PART = Device(index="4.0", uuid="MIG-1", name="MIG 1g.18gb")
ALL = [*H200, L4, PART]


@pytest.mark.parametrize(
    ("pinned", "expected"),
    [
        (["GPU-1"], "NVIDIA H200 140 GiB"),
        (["GPU-2"], "NVIDIA H200 140 GiB"),
        (["0", " 1"], "2 x NVIDIA H200 140 GiB"),
        (["GPU-3", "GPU-0"], "NVIDIA H200 140 GiB + NVIDIA L4 22 GiB"),
        (["MIG-1"], "MIG 1g.18gb"),
        (["GPU-other"], ""),
        ([""], "MIG 1g.18gb + 3 x NVIDIA H200 140 GiB + NVIDIA L4 22 GiB"),
    ],
)
def test_a_kind_names_devices_and_memory_and_no_single_one(pinned: list[str], expected: str) -> None:
    assert kind_of(pinned, ALL) == expected


def test_a_processor_is_told_by_its_memory() -> None:
    assert kind_of_processor(23_900) == "cpu 23 GiB"
    assert device_kind("cpu") == device_kind("CPU")
    assert re.fullmatch(r"cpu [1-9]\d* GiB", device_kind("cpu"))


def test_a_device_that_no_driver_lists_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert device_kind("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-1"}) == "cuda:0"
