"""What is made of NVML's answers, and of its refusals."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from batchmill_db.samples import DeviceReading
from batchmill_workers.gpu import sampler_nvml
from batchmill_workers.gpu.sampler_nvml import NvmlReader, throttles
from batchmill_workers.gpu.sampler_reader import reader_for
from tests.fake_nvml import FakeNvml


def reader(case: str, *devices: str, **more: Any) -> NvmlReader:
    return NvmlReader(devices, nvml=FakeNvml(case, **more))


def read_one(found: NvmlReader) -> DeviceReading:
    (reading,) = found.read()
    return reading


def test_a_gpu_is_found_by_its_uuid_and_read_in_our_units() -> None:
    reading = read_one(reader("two-gpus", "GPU-bbbb"))

    assert reading == DeviceReading(
        device="1",
        use_percent=12.0,
        memory_used_bytes=1 << 30,
        memory_total_bytes=150_754_820_096,
        power_w=131.0,
        temperature_c=41.0,
        clock_mhz=345,
        throttle=None,
    )


def test_a_slot_of_two_gpus_has_a_reading_of_each() -> None:
    found = reader("two-gpus", "GPU-aaaa", "GPU-bbbb")

    assert [r.device for r in found.read()] == ["0", "1"]
    assert found.devices == ("0", "1")


def test_use_is_the_mean_of_what_was_seen_since_the_last_sample() -> None:
    found = reader("two-gpus", "GPU-aaaa")
    first = read_one(found)
    found.peek()

    assert (first.use_percent, read_one(found).use_percent) == (0.0, 98.0)


def test_a_user_may_have_pinned_by_numbers() -> None:
    assert read_one(reader("two-gpus", "1")).use_percent == 12.0


def test_a_part_of_a_gpu_has_its_own_memory_and_the_power_of_the_whole() -> None:
    reading = read_one(reader("mig", "MIG-dddd"))

    assert reading.device == "0.2"
    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (9_000_000_000, 17_716_740_096)
    assert (reading.use_percent, reading.power_w, reading.clock_mhz) == (None, 210.0, 1980)


def test_the_use_of_a_part_is_not_even_asked_for() -> None:
    nvml = FakeNvml("mig")
    NvmlReader(["MIG-cccc"], nvml=nvml).read()

    assert "use" not in nvml.asked


def test_heat_is_named() -> None:
    assert (
        read_one(reader("hot", "GPU-aaaa")).throttle == "power_cap,hardware_slowdown,software_thermal,hardware_thermal"
    )


@pytest.mark.parametrize(
    ("reasons", "said"), [(0, ""), (1, ""), (2, ""), (4, "power_cap"), (0x20, "software_thermal"), (0x101, "")]
)
def test_only_what_slows_a_gpu_down_is_said(reasons: int, said: str) -> None:
    assert throttles(reasons) == said


def test_an_older_library_names_the_reasons_otherwise() -> None:
    assert read_one(reader("hot", "GPU-aaaa", old=True)).throttle is not None


def test_a_figure_that_a_gpu_does_not_have_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    found = reader("consumer", "GPU-aaaa")
    readings = [read_one(found) for _ in range(3)]

    assert [(r.power_w, r.throttle, r.use_percent) for r in readings] == [(None, None, 55.0)] * 3
    assert [r.getMessage().split(" error=")[0] for r in caplog.records] == [
        "device_figure_missing device=0 figure=power",
        "device_figure_missing device=0 figure=throttling",
    ]


def test_a_gpu_that_is_lost_has_no_figures_until_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    found = reader("lost", "GPU-aaaa")
    before, lost, still, back = (read_one(found) for _ in range(4))

    assert (before.use_percent, back.use_percent) == (50.0, 70.0)
    assert lost == still == DeviceReading(device="0")
    assert [r.getMessage() for r in caplog.records] == [
        "device_figure_missing device=0 figure=all error=GpuIsLost",
        "device_is_back device=0",
    ]


def test_a_gpu_that_nvml_does_not_know_has_no_figures(caplog: pytest.LogCaptureFixture) -> None:
    found = reader("two-gpus", "GPU-zzzz", "GPU-bbbb")
    readings = found.read() + found.read()

    assert [(r.device, r.use_percent) for r in readings] == [("GPU-zzzz", None), ("1", 12.0)] * 2
    assert len(caplog.records) == 1


def test_a_driver_that_is_gone_is_said_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml("two-gpus", init_error="DriverNotLoaded")
    found = NvmlReader(["GPU-bbbb"], nvml=nvml)
    away = [read_one(found) for _ in range(2)]
    nvml.init_error = None

    assert away == [DeviceReading(device="GPU-bbbb")] * 2
    assert read_one(found).use_percent == 12.0
    assert [r.getMessage() for r in caplog.records] == [
        "nvml_not_there error=DriverNotLoaded; work goes on without figures of GPUs"
    ]


def test_without_the_library_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    found = NvmlReader(["GPU-aaaa"])
    readings = [read_one(found) for _ in range(2)]
    found.close()

    assert readings == [DeviceReading(device="GPU-aaaa")] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "nvml_missing; for figures of GPUs: pip install 'batchmill[nvidia]'"
    ]


def test_what_was_opened_is_closed_once() -> None:
    nvml = FakeNvml("two-gpus")
    found = NvmlReader(["GPU-aaaa"], nvml=nvml)
    found.read()
    found.close()
    found.close()

    assert nvml.open == 0


def test_a_pinned_process_reads_the_gpus_it_is_pinned_to(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvml("two-gpus")
    monkeypatch.setattr(sampler_nvml.importlib, "import_module", lambda _: fake)
    pinned = reader_for("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"})
    loose = reader_for("cuda:1", {})

    assert [r.device for r in pinned.read()] == ["1", "0"]
    assert [r.device for r in loose.read()] == ["1"]


def test_the_real_library_has_all_that_is_asked_of_it() -> None:
    """The fake has only what the reader uses, so that what it has is what the real one must have."""
    real = importlib.import_module("pynvml")
    named = {n for n in vars(FakeNvml) if n.startswith(("nvml", "NVML"))}

    assert {n for n in named if not hasattr(real, n)} == set()
    assert {n for n in sampler_nvml._FATAL if not issubclass(getattr(real, n), real.NVMLError)} == set()


def test_the_real_library_on_any_host_says_no_more_than_that_such_a_gpu_is_not_there() -> None:
    found = NvmlReader(["GPU-00000000-0000-0000-0000-000000000000"])
    readings = found.read()
    found.close()

    assert readings == [DeviceReading(device="GPU-00000000-0000-0000-0000-000000000000")]
