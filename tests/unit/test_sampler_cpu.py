"""What psutil really says of this host's processor."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from batchmill_workers.gpu import sampler_cpu
from batchmill_workers.gpu.sampler_cpu import CpuReader
from batchmill_workers.gpu.sampler_reader import reader_for


def test_the_processor_tells_its_use_and_memory() -> None:
    found = reader_for("cpu")
    (reading,) = found.read()
    found.close()

    assert (reading.device, found.devices) == ("cpu", ("cpu",))
    assert reading.use_percent is not None
    assert 0 <= reading.use_percent <= 100
    assert reading.memory_used_bytes is not None
    assert reading.memory_total_bytes is not None
    assert 0 < reading.memory_used_bytes < reading.memory_total_bytes <= psutil.virtual_memory().total
    assert reading.power_w is None


def test_only_the_cores_that_this_process_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda percpu: [100.0, 20.0, 0.0, 40.0])
    monkeypatch.setattr(sampler_cpu.os, "sched_getaffinity", lambda _: {1, 3})

    assert CpuReader().read()[0].use_percent == 30.0


def test_memory_is_that_of_the_container_where_it_has_a_limit(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n",
        "sys/fs/cgroup/memory.max": "4096000\n",
        "sys/fs/cgroup/memory.current": "900000\n",
        "sys/fs/cgroup/memory.stat": "anon 500\ninactive_file 300000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    (reading,) = CpuReader(tmp_path).read()

    assert (reading.memory_used_bytes, reading.memory_total_bytes) == (600_000, 4_096_000)


@pytest.mark.parametrize("fault", [psutil.Error("x"), OSError("x"), NotImplementedError(), RuntimeError("x")])
def test_what_a_host_does_not_tell_is_none(fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise fault

    for name in ("cpu_percent", "cpu_freq"):
        monkeypatch.setattr(psutil, name, refuse)
    monkeypatch.setattr(psutil, "sensors_temperatures", refuse, raising=False)

    (reading,) = CpuReader(tmp_path).read()

    assert (reading.use_percent, reading.memory_used_bytes) == (None, None)
    assert (reading.temperature_c, reading.clock_mhz) == (None, None)


def test_the_hottest_sensor_of_the_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sensor:
        def __init__(self, current: float) -> None:
            self.current = current

    sensors = {"coretemp": [Sensor(50.0), Sensor(61.0)], "nvme": [Sensor(80.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors, raising=False)

    assert CpuReader().read()[0].temperature_c == 61.0
