"""A server of the user's own under the engine ``server``: asked, lost and started again, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import (
    CallError,
    CallState,
    CallTimeout,
    ConfigurationError,
    EngineDown,
    EngineLost,
    InvalidRequest,
    Unavailable,
)
from batchmill_core.request import Request, TaskKind
from batchmill_core.settings import HOME_VARIABLE
from batchmill_workers.gpu.server import ServerEngine
from batchmill_workers.gpu.server_pulse import FAULTS
from tests.conformance.engine_host import EngineCase, EngineHost, chat
from tests.integration.harness import until

UNRULY = Path(__file__).parents[1] / "unruly_server.py"
SIMULATOR = [sys.executable, "-m", "batchmill_ops.simulator", "--host={host}", "--port={port}"]

WORKER = """
import asyncio, sys
from batchmill_core.catalog import ModelEntry
from batchmill_workers.gpu.server import ServerEngine
async def main():
    engine = ServerEngine(model=ModelEntry(name="m", model="m-1", engine="server", options={"command": sys.argv[1:]}))
    await engine.start()
    print(engine.facts["pid"], flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""

Serve = Callable[..., EngineHost]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return tmp_path


def unruly(mood: str, folder: Path) -> list[str]:
    return [sys.executable, str(UNRULY), "{port}", mood, str(folder)]


def engine_for(command: list[str], *, upstream: str = "m-1", timeout_s: float = 60, **options: Any) -> ServerEngine:
    options = {"start_timeout_s": 60, "stop_timeout_s": 1, "command": command, **options}
    entry = ModelEntry(name="m", model=upstream, engine="server", timeout_s=timeout_s, options=options)
    return ServerEngine(model=entry, device="cpu")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts an engine on a loop in a thread; all are closed when the test is over."""
    with ExitStack() as stack:

        def make(command: list[str], **options: Any) -> EngineHost:
            host = EngineHost(EngineCase(name="server", make=lambda: engine_for(command, **options)))
            stack.callback(host.close)
            host.run(host.engine.start())
            return host

        yield make


def server_of(host: EngineHost) -> ServerEngine:
    assert isinstance(host.engine, ServerEngine)
    return host.engine


def failures(host: EngineHost, *requests: Request) -> list[object]:
    """What became of requests in flight together, errors included."""

    async def together() -> list[object]:
        return list(await asyncio.gather(*(host.engine.complete(r) for r in requests), return_exceptions=True))

    return host.run(together())


def refusal(command: list[str], **options: Any) -> str:
    """Why an engine does not start."""
    engine = engine_for(command, **options)

    async def act() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ConfigurationError) as refused:
        asyncio.run(act())
    return str(refused.value)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that its parent has not yet looked at is gone too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# what it answers


def test_chat_streams_and_embeddings_are_answered_and_device_time_adds_up(serve: Serve) -> None:
    host = serve([*SIMULATOR, "--latency=20ms"], upstream="sim-chat")
    engine = server_of(host)
    before_ns = engine.meter.busy_ns
    plain = chat("Row 1: great", max_tokens=5)
    streamed = Request(messages=plain.messages, params=plain.params, stream=True)
    answers = host.answer(plain, streamed, *(chat(f"Row {n}: great", max_tokens=5) for n in range(20)))

    assert all(answer.text and answer.usage and answer.usage.output == 5 for answer in answers)
    assert answers[0].ttft_ms is None
    assert answers[1].ttft_ms is not None
    assert sum(answer.device_ns or 0 for answer in answers) == engine.meter.busy_ns - before_ns
    assert engine.figures().output_tokens == 22 * 5
    assert engine.facts["load_s"] > 0
    assert engine.facts["warm_up_s"] > 0


def test_a_server_of_embeddings_alone_is_warmed_up_and_asked(serve: Serve) -> None:
    host = serve([*SIMULATOR, "--latency=1ms"], upstream="sim-embed")
    (answer,) = host.answer(Request(task=TaskKind.EMBED, inputs=("a", "b", "c")))

    assert len(answer.vectors) == 3
    assert answer.device_ns


def test_no_more_calls_are_in_flight_than_the_server_has_places_for(serve: Serve) -> None:
    host = serve([*SIMULATOR, "--latency=50ms"], upstream="sim-chat", capacity_rows=3)
    engine = server_of(host)

    async def most_running() -> int:
        tasks = [asyncio.create_task(engine.complete(chat(f"Row {n}: x"))) for n in range(12)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, engine.figures().running)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
        return most

    assert host.run(most_running()) == 3


def test_the_server_inherits_the_slots_devices_but_not_our_secrets(
    serve: Serve, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7,GPU-8")
    monkeypatch.setenv("BATCHMILL_DATABASE_URL", "postgresql://u:secret@h/d")
    host = serve(unruly("good", home), env={"ADDRESS": "{host}:{port} {model} {device} {gpus}"})
    seen = json.loads((home / "environment").read_text())

    assert seen["CUDA_VISIBLE_DEVICES"] == "GPU-7,GPU-8"
    assert seen["ADDRESS"] == f"127.0.0.1:{server_of(host).facts['port']} m-1 cpu 2"
    assert not [name for name in seen if name.startswith("BATCHMILL_")]
    assert host.engine.context_tokens == 512


@pytest.mark.parametrize("mood", ["slow to load", "no health", "cannot bind at first"])
def test_a_server_that_takes_its_time_is_waited_for(serve: Serve, home: Path, mood: str) -> None:
    (answer,) = serve(unruly(mood, home)).answer(chat("Hi"))

    assert answer.text == "yes"


def test_a_number_that_json_has_not_is_refused_before_it_is_sent(serve: Serve, home: Path) -> None:
    (error,) = failures(serve(unruly("good", home)), chat("Hi", temperature=float("nan")))

    assert isinstance(error, InvalidRequest)
    assert "temperature" in error.message


# how it is lost


def test_a_server_that_is_killed_loses_its_calls_and_is_started_again(serve: Serve) -> None:
    host = serve([*SIMULATOR, "--latency=300s"], upstream="sim-chat", warm_up=False)
    engine = server_of(host)
    first_pid = engine.facts["pid"]

    async def kill_while_answering() -> list[object]:
        tasks = [asyncio.create_task(engine.complete(chat(f"Row {n}: x"))) for n in range(3)]
        async with asyncio.timeout(60):
            while engine.figures().running < 3:  # noqa: ASYNC110  # the meter is a counter, not an event
                await asyncio.sleep(0.005)
        os.kill(first_pid, signal.SIGKILL)
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    lost = host.run(kill_while_answering())
    until("it is started again", lambda: engine.facts["pid"] != first_pid)

    for error in lost:
        assert isinstance(error, EngineLost)
        assert "killed by signal 9 (SIGKILL)" in error.message
        assert error.call_state is CallState.UNKNOWN
        assert error.device_ns


def test_a_call_made_while_the_server_starts_again_waits_for_it(serve: Serve, home: Path) -> None:
    host = serve(unruly("good", home))
    (lost,) = failures(host, chat("please die"))
    (answer,) = host.answer(chat("Hi"))

    assert isinstance(lost, EngineLost)
    assert answer.text == "yes"


def test_a_server_that_hangs_is_told_by_its_silence_and_started_again(serve: Serve, home: Path) -> None:
    host = serve(unruly("good", home), timeout_s=1)
    first_pid = server_of(host).facts["pid"]
    lost = failures(host, chat("hang"), chat("Hi"))
    (answer,) = host.answer(chat("hang"))

    assert all(isinstance(error, EngineLost) and "hangs" in error.message for error in lost)
    assert answer.text == "yes"
    assert server_of(host).facts["pid"] != first_pid
    assert gone(first_pid)


def test_a_row_that_is_too_slow_times_out_alone(serve: Serve, home: Path) -> None:
    host = serve(unruly("good", home), timeout_s=1)
    first_pid = server_of(host).facts["pid"]
    (slow,) = failures(host, chat("slowly"))
    (answer,) = host.answer(chat("Hi"))

    assert isinstance(slow, CallTimeout)
    assert slow.device_ns
    assert answer.text == "yes"
    assert server_of(host).facts["pid"] == first_pid


def test_a_server_that_answers_nothing_but_errors_is_started_again(serve: Serve, home: Path) -> None:
    host = serve(unruly("good", home))
    first_pid = server_of(host).facts["pid"]
    failed = failures(host, *(chat("break") for _ in range(FAULTS)))
    until("it is started again", lambda: server_of(host).facts["pid"] != first_pid)
    (answer,) = host.answer(chat("Hi"))

    assert all(isinstance(error, Unavailable | EngineLost) for error in failed)
    assert answer.text == "yes"


def test_rows_that_a_server_cannot_answer_do_not_start_it_again(serve: Serve, home: Path) -> None:
    host = serve(unruly("good", home))
    first_pid = server_of(host).facts["pid"]
    failed = failures(host, *(chat("bad row") for _ in range(2 * FAULTS)))
    (answer,) = host.answer(chat("Hi"))

    assert all(isinstance(error, Unavailable) for error in failed)
    assert answer.text == "yes"
    assert server_of(host).facts["pid"] == first_pid


def test_a_server_that_cannot_be_started_again_is_down_and_says_its_last_words(serve: Serve, home: Path) -> None:
    host = serve(unruly("starts once", home))
    os.kill(server_of(host).facts["pid"], signal.SIGKILL)

    def its_end() -> EngineDown | None:
        (error,) = failures(host, chat("Hi"))
        return error if isinstance(error, EngineDown) else None

    down = until("the engine is down", its_end, timeout_s=60)

    assert down.call_state is CallState.VOID
    assert "cannot be started again" in down.message
    assert "RuntimeError: out of memory" in down.message


# what stands in its way


def test_a_command_that_does_not_exist_is_named() -> None:
    said = refusal(["no-such-server", "{port}"])

    assert "model m: 'no-such-server' cannot be started: No such file or directory" in said


def test_a_server_that_dies_before_it_is_ready_is_quoted(home: Path) -> None:
    said = refusal(unruly("dies", home))

    assert "ended with exit status 3" in said
    assert "server-m-cpu.log ends: reading the weights | RuntimeError: out of memory" in said
    assert str(UNRULY) in said


def test_a_server_that_is_never_ready_says_what_it_lacks_and_is_ended(home: Path) -> None:
    said = refusal(unruly("never ready", home), start_timeout_s=2)

    assert "was not ready within 2 s: it answers 503 to GET /health" in said


def test_a_port_that_is_taken_is_said_before_anything_starts(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refusal(unruly("good", home), port=port)

    assert f"port {port} is taken by another program" in said
    assert not (home / "environment").exists()


def test_a_model_that_the_server_does_not_serve_is_told_from_those_it_serves(home: Path) -> None:
    said = refusal(unruly("good", home), upstream="m-2")

    assert "does not serve 'm-2'" in said
    assert "it serves 'm-1': write model = one of them" in said


def test_a_server_that_wants_a_key_is_a_configuration_error(home: Path) -> None:
    assert "the server wants a key" in refusal(unruly("wants a key", home))


def test_a_source_that_the_command_needs_must_be_given(home: Path) -> None:
    assert "its command has {source}, but no source is given" in refusal([*unruly("good", home), "{source}"])


def test_a_closed_engine_answers_nothing(home: Path) -> None:
    engine = engine_for(unruly("good", home))

    async def act() -> None:
        await engine.start()
        await engine.close()
        await engine.close()
        await engine.complete(chat("Hi"))

    with pytest.raises(CallError, match="closed") as refused:
        asyncio.run(act())
    assert refused.value.call_state is CallState.VOID
    assert gone(engine.facts["pid"])


# nothing is left behind


def test_closing_ends_the_server_and_all_that_it_started(home: Path) -> None:
    engine = engine_for(unruly("has children", home))

    async def act() -> None:
        await engine.start()
        await engine.close()

    asyncio.run(act())
    children = [int(pid) for pid in (home / "children").read_text().split()]

    assert gone(engine.facts["pid"])
    assert [gone(pid) for pid in children] == [True, True]


@pytest.mark.parametrize("mood", ["has children", "stubborn"])
def test_a_worker_that_is_killed_takes_its_server_along(home: Path, mood: str) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, *unruly(mood, home)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    server = int(worker.stdout.readline())
    family = [server, *(child.pid for child in psutil.Process(server).children(recursive=True))]
    worker.kill()
    worker.wait()
    worker.stdout.close()

    until("the server and its children are gone", lambda: all(gone(pid) for pid in family))
    assert len(family) == (3 if mood == "has children" else 1)


def test_a_server_whose_guard_is_killed_dies_with_it_and_is_started_again(serve: Serve, home: Path) -> None:
    host = serve(unruly("good", home))
    first_pid = server_of(host).facts["pid"]
    psutil.Process(first_pid).parent().kill()  # type: ignore[union-attr]  # the guard is its parent
    until("it is started again", lambda: server_of(host).facts["pid"] != first_pid)
    (answer,) = host.answer(chat("Hi"))

    assert answer.text == "yes"
    assert gone(first_pid)


def test_a_start_that_is_broken_off_leaves_nothing(home: Path) -> None:
    engine = engine_for(unruly("never ready", home))

    async def act() -> int:
        start = asyncio.create_task(engine.start())
        async with asyncio.timeout(60):
            while not (home / "environment").exists():  # noqa: ASYNC110  # another process makes it
                await asyncio.sleep(0.01)
        (guard,) = [c for c in psutil.Process().children() if any("server_guard" in word for word in c.cmdline())]
        (server,) = guard.children()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await engine.close()
        return server.pid

    assert gone(asyncio.run(act()))
