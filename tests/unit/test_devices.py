"""``--devices`` is read into slots, or refused in one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu import listing
from batchmill_workers.gpu.devices import Device, by_numbers, cores_of_quota, parse_devices

GPUS = (
    Device(index="0", uuid="GPU-aaa", name="NVIDIA L4", memory_mib=23034),
    Device(index="1", uuid="GPU-bbb", name="NVIDIA L4", memory_mib=23034),
)
QUERY = "0, GPU-aaa, NVIDIA A100, 40960\n1, GPU-bbb, NVIDIA A100, [N/A]\n"
LISTING = """\
GPU 0: NVIDIA A100 (UUID: GPU-aaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-one)
  MIG 3g.20gb     Device  1: (UUID: MIG-two)
GPU 1: NVIDIA A100 (UUID: GPU-bbb)
"""


def test_all_gives_every_gpu_a_slot_of_its_own() -> None:
    slots = parse_devices("all", GPUS)

    assert [(slot.name, slot.devices) for slot in slots] == [("gpu0", ("GPU-aaa",)), ("gpu1", ("GPU-bbb",))]


def test_a_slot_is_pinned_by_uuid_in_bus_order() -> None:
    (slot,) = parse_devices("1", GPUS)

    assert slot.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-bbb"}
    assert slot.engine_device == "cuda:0"


def test_gpus_joined_by_a_plus_are_one_slot() -> None:
    (slot,) = parse_devices("0+1", GPUS)

    assert slot.name == "gpu0+1"
    assert slot.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-aaa,GPU-bbb"


def test_a_gpu_may_be_named_by_its_uuid() -> None:
    (slot,) = parse_devices("GPU-bbb", GPUS)

    assert slot.worker_name("host7") == "gpu1@host7"


def test_the_beginning_of_a_uuid_is_enough_if_it_is_one_gpus_alone() -> None:
    assert [slot.devices for slot in parse_devices("GPU-a,gpu-B", GPUS)] == [("GPU-aaa",), ("GPU-bbb",)]


@pytest.mark.parametrize("text", ["GPU-", "G", "GPU-a,GPU-aaa"])
def test_a_beginning_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_devices(text, GPUS)


def test_the_processor_slot_sees_no_gpu_and_knows_its_threads() -> None:
    (slot,) = parse_devices("cpu", cores=6)

    assert slot.environment() == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "6",
    }
    assert slot.worker_name("host") == "cpu0@host"
    assert slot.engine_device == "cpu"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,0", "GPU-aaa is named more than once"),
        ("0+1,GPU-bbb", "GPU-bbb is named more than once"),
        ("cpu,cpu", "cpu is named more than once"),
        ("7", "this host has no device '7'; it has 0 (NVIDIA L4), 1 (NVIDIA L4)"),
        ("0+0", "GPU-aaa is named more than once"),
        ("0+", "a plus joins GPUs, as 0+1; '' is none"),
        ("+", "a plus joins GPUs"),
        ("cpu+0", "a plus joins GPUs, as 0+1; 'cpu' is none"),
        ("0+all", "'all' is none"),
        ("-1", "this host has no device '-1'"),
        ("00", "this host has no device '00'"),
        ("0.5", "this host has no device '0.5'"),
        ("GPU-cc", "no device 'GPU-cc'; it has 0 (GPU-aaa), 1 (GPU-bbb)"),
        ("all,all", "'all' stands alone"),
        ("", "--devices is empty"),
        (" , ", "--devices is empty"),
        ("all,0", "'all' stands alone"),
    ],
)
def test_a_wrong_list_of_devices_is_refused_by_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_devices(text, GPUS)

    assert said in str(refused.value)


@pytest.mark.parametrize(("text", "same"), [("ALL", "all"), ("Cpu", "cpu"), (" 0 + 1 ", "0+1"), ("0,,1,", "0,1")])
def test_blanks_and_the_case_of_words_do_not_matter(text: str, same: str) -> None:
    assert parse_devices(text, GPUS) == parse_devices(same, GPUS)


def test_an_nvidia_smi_that_cannot_be_run_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigurationError, match=r"nvidia-smi cannot be run: .*--devices cpu"):
        listing.slots("all")


def test_an_nvidia_smi_that_prints_other_bytes_than_text_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_bytes(b"#!/bin/sh\n[ \"$1\" = -L ] || printf '0, GPU-aaa, NVIDIA \\377, 100\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert [slot.devices for slot in listing.slots("all")] == [("GPU-aaa",)]


@pytest.mark.parametrize("text", ["all", "0"])
def test_without_a_gpu_the_processor_is_suggested(text: str) -> None:
    with pytest.raises(ConfigurationError, match="use --devices cpu"):
        parse_devices(text, ())


def test_a_divided_gpu_stands_as_its_parts() -> None:
    devices = listing.with_parts(listing.parse_query(QUERY), LISTING)

    assert [(d.index, d.uuid) for d in devices] == [("0.0", "MIG-one"), ("0.1", "MIG-two"), ("1", "GPU-bbb")]


def test_memory_that_the_driver_does_not_tell_is_unknown() -> None:
    assert [d.memory_mib for d in listing.parse_query(QUERY)] == [40960, None]


def test_a_host_without_nvidia_smi_is_told_to_use_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigurationError, match=r"nvidia-smi is not installed.*--devices cpu"):
        listing.slots("all")


def test_the_processor_needs_no_listing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert [slot.name for slot in listing.slots("cpu")] == ["cpu0"]


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000\n", None), ("200000 100000\n", 2), ("50000 100000", 1), ("150000 100000", 2)]
)
def test_a_containers_quota_bounds_the_cores(cpu_max: str, cores: int | None) -> None:
    assert cores_of_quota(cpu_max) == cores


def test_whole_gpus_can_be_named_by_number_for_libraries_that_take_no_uuid_and_parts_cannot() -> None:
    parted = (Device(index="1", uuid="GPU-bbb"), Device(index="0.0", uuid="MIG-one"))

    assert by_numbers("GPU-bbb,MIG-one,GPU-gone", parted) == "1,MIG-one,GPU-gone"


def test_pins_stay_where_the_driver_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-aaa"}
    listing.pin_by_numbers(environment)

    assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-aaa"}


FOUR = tuple(Device(index=str(n), uuid=f"GPU-{letter * 8}", name="NVIDIA L4") for n, letter in enumerate("abcd"))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,3", ["gpu2", "gpu3"]),
        ("3, 1", ["gpu3", "gpu1"]),
        ("GPU-cccccccc", ["gpu2"]),
        ("GPU-dd,0", ["gpu3", "gpu0"]),
        ("1,-1,2", ["gpu1"]),
        ("1,1", ["gpu1"]),
    ],
)
def test_all_are_those_that_cuda_visible_devices_leaves(visible: str, names: list[str]) -> None:
    assert [slot.name for slot in parse_devices("all", FOUR, visible=visible)] == names


def test_a_divided_gpu_that_is_left_is_left_with_its_parts() -> None:
    devices = listing.with_parts(listing.parse_query(QUERY), LISTING)

    assert [slot.name for slot in parse_devices("all", devices, visible="0")] == ["gpu0.0", "gpu0.1"]
    assert [slot.name for slot in parse_devices("all", devices, visible="MIG-two,1")] == ["gpu0.1", "gpu1"]


@pytest.mark.parametrize(
    ("text", "visible", "said"),
    [
        ("0", "2,3", "no device '0'; it has 2 (NVIDIA L4), 3 (NVIDIA L4) (CUDA_VISIBLE_DEVICES=2,3 is set here"),
        ("2+0", "2,3", "it leaves these of the host's 4"),
        ("all", "", "leaves no GPU; unset it, or use --devices cpu"),
        ("all", "-1", "CUDA_VISIBLE_DEVICES=-1 is set here and leaves no GPU"),
        ("all", "0,7", "CUDA_VISIBLE_DEVICES: this host has no device '7'"),
    ],
)
def test_what_cuda_visible_devices_leaves_out_is_refused_in_one_sentence(text: str, visible: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_devices(text, FOUR, visible=visible)

    assert said in str(refused.value)


def test_the_processor_needs_no_gpu_that_is_left() -> None:
    assert [slot.name for slot in parse_devices("cpu", cores=2, visible="")] == ["cpu0"]
