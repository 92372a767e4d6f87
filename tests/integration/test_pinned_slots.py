"""`worker gpu` on a host whose driver is a made one: each process is pinned to its own devices before it imports any thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.settings import HOME_VARIABLE
from batchmill_db import samples, telemetry
from tests.integration.harness import Mill, milling, until
from tests.integration.plugin_engine import install_engine
from tests.nvml.host import GIB, PART_1, PART_2, A, B, Host, gpu, host_in, part

ENGINE = '''
    """An engine that writes down what its process knew of devices when this module was imported."""

    import json
    import os
    import sys
    from pathlib import Path

    from batchmill_core.request import Completion
    from batchmill_core.usage import Usage

    SEEN = {
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "early": sorted({"torch", "pynvml", "vllm"} & set(sys.modules)),
    }


    class EchoEngine:
        capacity_rows = 4
        context_tokens = None

        def __init__(self, *, model, device):
            self.folder, self.device = Path(model.source), device

        async def start(self):
            seen = {**SEEN, "device": self.device}
            (self.folder / f"{os.getpid()}.new").write_text(json.dumps(seen))
            (self.folder / f"{os.getpid()}.new").rename(self.folder / f"{os.getpid()}.json")

        async def complete(self, request):
            text = SEEN["visible"]
            return Completion(text=text, finish_reason="stop", usage=Usage(input=1, output=1), device_ns=1, latency_ms=1)

        async def close(self):
            pass
'''


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return host_in(tmp_path / "driver")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return install_engine(tmp_path / "plugins", monkeypatch, entry="echo = env_echo:EchoEngine", code=ENGINE)


class Command:
    """`batchmill` as a user of the host has it."""

    def __init__(self, mill: Mill, host: Host, plugins: Path) -> None:
        self.mill = mill
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("BATCHMILL_", "CUDA_"))}
        self.environment = {
            **clean,
            **host.environment,
            HOME_VARIABLE: str(mill.home),
            "PYTHONPATH": str(plugins),
            "CUDA_DEVICE_ORDER": "FASTEST_FIRST",  # what a user's shell says must not leak into a slot
        }

    def line(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "batchmill.cli", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.line(*arguments), env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )

    @contextmanager
    def working(self, devices: str) -> Iterator[subprocess.Popen[str]]:
        """`worker gpu` for the length of a block."""
        command = self.line("worker", "gpu", "--model", "m", "--devices", devices)
        with (self.mill.home / "worker.log").open("wb") as log:
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, text=True)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    @property
    def log(self) -> str:
        return (self.mill.home / "worker.log").read_text()


@pytest.fixture
def command(tmp_path: Path, valkey_url: str, sqlite_url: str, host: Host, plugins: Path) -> Iterator[Command]:
    (tmp_path / "seen").mkdir()
    tables = f'\n[models.m]\nengine = "echo"\nsource = "{tmp_path / "seen"}"\ndevice_usd_per_hour = 1.0\n'
    settings = {"sample_every_s": 1, "drain_s": 2}
    servers = {"broker_url": valkey_url, "database_url": sqlite_url, "provider": "http://127.0.0.1:9/v1"}
    with milling(tmp_path, **servers, settings=settings, tables=tables) as mill:
        yield Command(mill, host, plugins)


def reports(command: Command, folder: Path, count: int) -> list[dict[str, Any]]:
    """What that many processes wrote down, by the devices that they see."""
    try:
        until(f"{count} slots have started", lambda: len(list(folder.glob("*.json"))) >= count, timeout_s=90)
    except AssertionError as late:
        raise AssertionError(f"{late}\n{command.log}") from None
    found = [json.loads(one.read_text()) for one in folder.glob("*.json")]
    return sorted(found, key=lambda one: str(one["visible"]))


@pytest.mark.parametrize(
    ("devices", "pins"),
    [
        ("all", [A, B]),
        ("0+1", [f"{A},{B}"]),
        ("1+0", [f"{B},{A}"]),
    ],
)
def test_each_process_sees_its_own_devices_before_it_imports_anything(
    command: Command, host: Host, tmp_path: Path, devices: str, pins: list[str]
) -> None:
    host.has(gpu(0, A), gpu(1, B))
    with command.working(devices):
        seen = reports(command, tmp_path / "seen", len(pins))
        with command.mill.database.reading() as conn:
            workers = telemetry.live_workers(conn)

    assert [one["visible"] for one in seen] == pins, command.log
    assert sorted(one.device or "" for one in workers) == pins
    assert {one["order"] for one in seen} == {"PCI_BUS_ID"}
    assert {one["device"] for one in seen} == {"cuda:0"}
    assert [one["early"] for one in seen] == [[]] * len(pins)


@pytest.mark.parametrize(("devices", "pins"), [("all", [PART_1, PART_2]), ("0.2", [PART_2])])
def test_a_part_of_a_divided_gpu_is_a_device_of_its_own(
    command: Command, host: Host, tmp_path: Path, devices: str, pins: list[str]
) -> None:
    host.has(gpu(0, A, use="!3"), part(0, PART_1), part(2, PART_2))
    with command.working(devices):
        seen = reports(command, tmp_path / "seen", len(pins))

    assert [one["visible"] for one in seen] == pins, command.log


def test_all_are_the_gpus_that_the_users_shell_leaves(command: Command, host: Host, tmp_path: Path) -> None:
    host.has(gpu(0, A), gpu(1, B))
    command.environment["CUDA_VISIBLE_DEVICES"] = "1"

    with command.working("all"):
        seen = reports(command, tmp_path / "seen", 1)

    assert [one["visible"] for one in seen] == [B], command.log
    refused = command.run("worker", "gpu", "--model", "m", "--devices", "0")
    assert "CUDA_VISIBLE_DEVICES=1 is set here" in refused.stderr


def test_rows_are_answered_and_each_slot_samples_its_own_gpu(command: Command, host: Host) -> None:
    host.has(gpu(0, A, used=10 * GIB, use=97), gpu(1, B, used=20 * GIB, use=12, temp=80))
    mill = command.mill
    job = mill.submit(16, model="m", chunk_size=2)

    def sampled() -> dict[str, Any]:
        with mill.database.reading() as conn:
            found = {one.device: one.figures for one in samples.newest(conn)}
        return found if {"0", "1"} <= found.keys() else {}

    with command.working("all"):
        mill.wait_done(job, timeout_s=90)
        found = until("both GPUs are sampled", sampled, timeout_s=60)
        table = command.run("gpus", "--once", "--json")
        host.has(gpu(0, A, all="!15"), gpu(1, B, use=12))
        until("the lost GPU is told", lambda: "error=GPU is lost" in command.log, timeout_s=60)
        after = mill.submit(8, model="m", chunk_size=2)
        mill.wait_done(after, timeout_s=90)

    assert {row.output for row in mill.results(job)} <= {A, B}
    assert (found["0"]["use_percent"], found["0"]["memory_used_bytes"]) == (97, 10 * GIB)
    assert (found["1"]["use_percent"], found["1"]["temperature_c"]) == (12, 80)
    assert {one["device"] for one in json.loads(table.stdout)} == {"0", "1"}, table.stdout
    assert command.log.count("GPU is lost") == 1


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ("0,0", f"{A} is named more than once"),
        (f"0,{A}", f"{A} is named more than once"),
        ("0+1,1", f"{B} is named more than once"),
        ("5", "this host has no device '5'; it has 0 (NVIDIA H200), 1 (NVIDIA H200)"),
        ("GPU-gone", "this host has no device 'GPU-gone'"),
    ],
)
def test_devices_that_are_not_there_or_named_twice_are_refused_by_the_command(
    command: Command, host: Host, devices: str, why: str
) -> None:
    host.has(gpu(0, A), gpu(1, B))
    refused = command.run("worker", "gpu", "--model", "m", "--devices", devices)

    assert refused.returncode == 2, refused.stderr
    assert why in " ".join(refused.stderr.split())
