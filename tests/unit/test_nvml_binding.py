"""The real nvidia-ml-py on a driver's library of our own making: what is read of GPUs, and what becomes of faults."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_db.samples import DeviceReading
from batchmill_workers.gpu.device_kind import device_kind
from batchmill_workers.gpu.device_memory import Holder, gpus_memory
from batchmill_workers.gpu.listing import available_devices, slots
from batchmill_workers.gpu.sampler_nvml import NvmlReader
from tests.nvml.host import GIB, PART_1, PART_2, A, B, Host, gpu, host_in, move_in, part, process

pynvml = importlib.import_module("pynvml")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = host_in(tmp_path / "driver")
    move_in(made, monkeypatch)
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_every_figure_passes_the_c_interface_whole(host: Host) -> None:
    host.has(gpu(0, A), gpu(1, B, used=120 * GIB, use=97, power=699_123, temp=81, clock=1_755, reasons=0x24))
    reader = NvmlReader([B])
    (reading,) = reader.read()
    reader.close()

    assert reading == DeviceReading(
        device="1",
        use_percent=97.0,
        memory_used_bytes=120 * GIB,
        memory_total_bytes=140 * GIB,
        power_w=699.123,
        temperature_c=81.0,
        clock_mhz=1755,
        throttle="power_cap,software_thermal",
    )


def test_a_session_with_the_driver_is_closed(host: Host) -> None:
    host.has(gpu(0, A))
    reader = NvmlReader([A])
    reader.read()
    reader.close()

    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_the_layouts_are_those_of_the_binding(host: Host) -> None:
    """Guards the library of the tests: it refuses other versions, as a driver does."""
    host.has(gpu(0, A, used=3 * GIB), process(A, 4711, 2 * GIB), process(A, 4712, GIB))
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    held = [(one.pid, one.usedGpuMemory) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]

    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        pynvml.nvmlDeviceGetMemoryInfo(handle, 1)
    pynvml.nvmlShutdown()
    assert (memory.total, memory.free, memory.used) == (140 * GIB, 137 * GIB, 3 * GIB)
    assert held == [(4711, 2 * GIB), (4712, GIB)]


def test_a_part_of_a_gpu_has_its_own_memory_and_the_heat_of_the_whole(host: Host) -> None:
    host.has(gpu(0, A, use="!3"), part(0, PART_1), part(3, PART_2, used=9 * GIB))
    reader = NvmlReader([PART_2])
    (reading,) = reader.read()
    reader.close()

    assert (reading.device, reading.memory_used_bytes, reading.memory_total_bytes) == ("0.3", 9 * GIB, 16 * GIB)
    assert (reading.use_percent, reading.power_w, reading.temperature_c) == (None, 300.0, 60.0)


def test_a_virtual_gpu_that_refuses_most_figures_is_read_for_the_others(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.has(gpu(0, A, use="!3", power="!3", temp="!3", clock="!3", reasons="!3"))
    reader = NvmlReader([A])
    readings = [reader.read()[0] for _ in range(3)]
    reader.close()

    assert [r.memory_used_bytes for r in readings] == [GIB] * 3
    assert {r.use_percent for r in readings} == {None}
    assert len(said(caplog)) == 5  # one a figure, not one a sample


@pytest.mark.parametrize(("error", "why"), [("!15", "GPU is lost"), ("!16", "GPU requires restart")])
def test_a_gpu_that_is_lost_in_the_middle_is_said_once_and_read_again_when_it_is_back(
    host: Host, caplog: pytest.LogCaptureFixture, error: str, why: str
) -> None:
    host.has(gpu(0, A))
    reader = NvmlReader([A])
    before = reader.read()
    host.has(gpu(0, A, all=error))
    away = [reader.read() for _ in range(3)]
    host.has(gpu(0, A, use=70))
    (back,) = reader.read()
    reader.close()

    assert before[0].use_percent == 50.0
    assert away == [[DeviceReading(device="0")]] * 3
    assert back.use_percent == 70.0
    assert said(caplog) == [f"device_figure_missing device=0 figure=all error={why}", "device_is_back device=0"]


def test_one_lost_gpu_of_a_slot_leaves_the_other_readable(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.has(gpu(0, A), gpu(1, B))
    reader = NvmlReader([A, B])
    reader.read()
    host.has(gpu(0, A, all="!15"), gpu(1, B))
    readings = [reader.read() for _ in range(3)]
    reader.close()

    assert [[r.use_percent for r in both] for both in readings] == [[None, 50.0]] * 3
    assert len(said(caplog)) == 1


def test_a_figure_that_comes_too_late_is_left_out_of_its_sample_alone(host: Host) -> None:
    host.has(gpu(0, A))
    reader = NvmlReader([A])
    host.has(gpu(0, A, power="!10"))
    (late,) = reader.read()
    host.has(gpu(0, A))
    (in_time,) = reader.read()
    reader.close()

    assert (late.power_w, late.use_percent) == (None, 50.0)
    assert in_time.power_w == 300.0


def test_a_driver_that_was_updated_under_the_library_is_said_once(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.has("driver init=!18")
    reader = NvmlReader([A])
    away = [reader.read() for _ in range(3)]
    host.has(gpu(0, A))
    (back,) = reader.read()
    reader.close()

    assert away == [[DeviceReading(device=A)]] * 3
    assert back.use_percent == 50.0
    assert said(caplog) == [
        "nvml_not_there error=RM has detected an NVML/RM version mismatch.; work goes on without figures of GPUs"
    ]


def test_a_driver_before_535_tells_what_slows_a_gpu_under_the_older_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = host_in(tmp_path / "old", old_driver=True)
    move_in(old, monkeypatch)
    old.has(gpu(0, A, reasons=0x40))
    reader = NvmlReader([A])
    (reading,) = reader.read()
    reader.close()

    assert reading.throttle == "hardware_thermal"
    assert said(caplog) == []


def test_the_host_is_listed_pinned_and_named_by_what_its_driver_says(host: Host) -> None:
    host.has(gpu(0, A), part(0, PART_1), part(1, PART_2), gpu(1, B))

    assert [(d.index, d.uuid) for d in available_devices()] == [("0.0", PART_1), ("0.1", PART_2), ("1", B)]
    assert [s.devices for s in slots("all")] == [(PART_1,), (PART_2,), (B,)]
    assert device_kind("cuda:0", {"CUDA_VISIBLE_DEVICES": B}) == "NVIDIA H200 140 GiB"
    assert device_kind("cuda:0", {"CUDA_VISIBLE_DEVICES": PART_2}) == "MIG 1g.18gb"


def test_free_memory_and_who_holds_the_rest_are_told_of_gpus_and_parts(host: Host) -> None:
    host.has(gpu(0, A), part(1, PART_2, used=10 * GIB), gpu(1, B, used=100 * GIB), process(B, 4711, 99 * GIB))
    of_part, of_gpu = gpus_memory([PART_2, B])

    assert (of_part.name, of_part.total_bytes, of_part.free_bytes) == ("device 0.1 (MIG 1g.18gb)", 16 * GIB, 6 * GIB)
    assert (of_gpu.free_bytes, of_gpu.holders) == (40 * GIB, (Holder(pid=4711, mib=99 * 1024),))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["driver init=!18"], r"Driver/library version mismatch"),
        (["driver init=!9"], r"couldn't communicate with the NVIDIA driver"),
        ([], r"No devices were found"),
    ],
)
def test_a_host_whose_driver_answers_nothing_is_refused_with_its_words(host: Host, lines: list[str], why: str) -> None:
    host.has(*lines)

    with pytest.raises(ConfigurationError, match=rf"no NVIDIA GPU was found on this host \(.*{why}"):
        slots("all")
