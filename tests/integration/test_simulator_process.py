"""The simulated provider as a server and as a process: connections, start, stop and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_ops.simulator import (
    LatencyShape,
    Simulator,
    SimulatorConfig,
    parse_faults,
    simulated,
)
from batchmill_ops.simulator.command import arguments_of, main

QUICK = SimulatorConfig(latency_s=0.0)


async def raw_exchange(config: SimulatorConfig, sent: bytes, *, until: Callable[[bytes], bool]) -> bytes:
    simulator = Simulator(config)
    port = await simulator.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(10):
            while not until(received) and (data := await reader.read(65536)):
                received += data
    finally:
        writer.close()
        await simulator.close()
    return received


def raw_post(text: str, *, extra: str = "") -> bytes:
    body = json.dumps({"model": "sim-chat", "messages": [{"role": "user", "content": text}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("latency_s", [0.0, 0.001])
def test_pipelined_requests_are_answered_in_their_order(latency_s: float) -> None:
    numbers = range(200)
    sent = b"".join(raw_post(f"say number<{n}>") for n in numbers)

    received = asyncio.run(
        raw_exchange(
            SimulatorConfig(latency_s=latency_s),
            sent,
            until=lambda got: got.count(b"HTTP/1.1 200") == 200 and got.endswith(b"}}}"),
        )
    )

    places = [received.index(f"number<{n}>".encode()) for n in numbers]
    assert places == sorted(places)


def test_a_client_that_asks_to_close_is_obeyed() -> None:
    received = asyncio.run(raw_exchange(QUICK, raw_post("bye", extra="Connection: close\r\n"), until=lambda _: False))

    assert received.count(b"HTTP/1.1 200") == 1


def test_bytes_that_are_no_http_are_refused_and_the_connection_closed() -> None:
    received = asyncio.run(raw_exchange(QUICK, b"\x16\x03\x01 hello\r\n\r\n", until=lambda _: False))

    assert received.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_expects_100_continue_gets_it() -> None:
    head = raw_post("x", extra="Expect: 100-continue\r\n").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    received = asyncio.run(raw_exchange(QUICK, head, until=lambda got: b"\r\n\r\n" in got))

    assert received.startswith(b"HTTP/1.1 100 Continue")


def test_a_port_in_use_is_refused_with_what_to_do() -> None:
    async def go() -> None:
        first, second = Simulator(QUICK), Simulator(QUICK)
        port = await first.start()
        try:
            with pytest.raises(ConfigurationError, match=f"port {port}.*Choose another port"):
                await second.start(port=port)
        finally:
            await first.close()

    asyncio.run(go())


@pytest.fixture
def children() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_simulator_process_serves_its_config_and_leaves_nothing_behind() -> None:
    config = SimulatorConfig(
        latency_s=0.0123,
        latency_jitter=0.25,
        requests_per_minute=1,
        faults=parse_faults("503:1"),
        seed=3,
        api_key="sk-x",
    )

    with simulated(config) as handle:
        status = subprocess.run(
            [sys.executable, "-c", f"import urllib.request as u; u.urlopen('{handle.base_url}/models')"],
            capture_output=True,
            text=True,
            check=False,
        )
        billed = handle.bill(calls=True)
        pid = handle.process.pid

    assert "401" in status.stderr
    assert billed["per_call"] == []
    assert not psutil.pid_exists(pid)


def test_a_config_survives_its_way_over_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimulatorConfig(
        latency_s=0.0123, latency_jitter=0.25, latency_shape=LatencyShape.UNIFORM, requests_per_minute=5,
        tokens_per_minute=7, faults=parse_faults("503:0.5,cut:0.125"), seed=-3, api_key="sk-x", context_tokens=9, kept_calls=0,
    )  # fmt: skip
    seen: list[SimulatorConfig] = []
    monkeypatch.setattr("batchmill_ops.simulator.command.run_simulator", lambda config, *_, **__: seen.append(config))

    main(arguments_of(config))

    assert seen == [config]


def test_a_simulator_ends_when_its_parent_is_killed(children: list[int]) -> None:
    program = (
        "from batchmill_ops.simulator import simulated\n"
        "import time\n"
        "with simulated() as s:\n"
        "    print(s.process.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    children.append(pid)
    child = psutil.Process(pid)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    child.wait(timeout=10)
    assert not child.is_running()


def test_sigterm_ends_the_module_cleanly_after_it_wrote_its_ready_file(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "batchmill_ops.simulator",
            "--port",
            "0",
            "--ready-file",
            str(ready),
            "--latency",
            "1ms",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    url = ready.read_text().strip()

    process.terminate()
    code = process.wait(10)
    process.stdout.close()

    assert line == f"listening on {url}"
    assert code == 0
