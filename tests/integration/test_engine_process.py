"""An engine's process as the worker sees it: whatever it says or does not say, no call waits for ever and nothing is left."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from batchmill_workers.gpu import engine_process
from batchmill_workers.gpu.engine_process import EngineProcess, ProcessLost
from batchmill_workers.gpu.frames import Frame
from tests.descriptors import open_sockets

MODULE = """
    import socket, sys, time
    from batchmill_workers.gpu.frames import Channel, HEADER

    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connection)
    (configuration,) = channel.receive(wait=True)
    channel.send({"ready": {}})
    (call,) = channel.receive(wait=True)
    if configuration["mood"] == "garbage":
        connection.sendall(HEADER.pack(5) + b"{what")
    elif configuration["mood"] == "news":
        channel.send({"figures": "none"})
        channel.send({"id": call["id"], "done": True})
    elif configuration["mood"] == "slow":
        for _ in range(12):
            time.sleep(0.1)
            channel.send({"figures": {}})
        channel.send({"id": call["id"], "done": True})
    try:
        channel.receive(wait=True)
    except EOFError:
        pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "moody_process.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "moody_process"


async def asked(process: EngineProcess, mood: str) -> Frame:
    await process.start({"mood": mood}, timeout_s=60)
    return await asyncio.wait_for(process.call({}, lambda _: None), 60)


def lost(process: EngineProcess, mood: str) -> str:
    async def act() -> str:
        try:
            with pytest.raises(ProcessLost) as fault:
                await asked(process, mood)
            return str(fault.value)
        finally:
            await process.close()

    return asyncio.run(act())


def test_a_message_that_is_no_json_loses_the_process_and_its_calls(module: str) -> None:
    process = EngineProcess(module)

    assert "a message of the engine's process cannot be taken: JSONDecodeError" in lost(process, "garbage")
    assert not process.alive


def test_news_that_cannot_be_taken_lose_the_process_and_its_calls(module: str) -> None:
    def refuse(frame: Frame) -> None:
        raise KeyError(frame["figures"])

    assert "cannot be taken: KeyError('none')" in lost(EngineProcess(module, refuse), "news")


def test_a_configuration_that_json_cannot_hold_starts_no_process(module: str) -> None:
    process = EngineProcess(module)
    unfit: dict[str, Any] = {"mood": {1, 2}}

    with pytest.raises(TypeError):
        asyncio.run(process.start(unfit, timeout_s=60))
    assert process.pid is None


def test_a_process_that_cannot_be_started_says_why_and_leaves_nothing_open(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process.sys, "executable", str(tmp_path / "no-python"))

    async def act() -> tuple[str, set[str]]:
        before = open_sockets()
        with pytest.raises(ProcessLost) as fault:
            await EngineProcess(module).start({}, timeout_s=60)
        return str(fault.value), open_sockets() - before

    said, left = asyncio.run(act())

    assert "the engine's process cannot be started" in said
    assert "no-python" in said
    assert left == set()


def test_a_process_that_comes_no_further_is_ended_and_its_calls_say_so(module: str) -> None:
    process = EngineProcess(module, silence_s=0.5)

    assert "the engine hangs: it came no further for 0.5 s and was ended" in lost(process, "silent")
    assert not process.alive
    assert not process.killed  # else it would be taken for one that the kernel ended for its memory


def test_a_process_that_comes_further_may_take_longer_than_its_silence(module: str) -> None:
    process = EngineProcess(module, silence_s=0.5)

    async def act() -> Frame:
        try:
            return await asked(process, "slow")
        finally:
            await process.close()

    assert asyncio.run(act())["done"]


def test_a_process_without_calls_may_be_silent_as_long_as_it_likes(module: str) -> None:
    process = EngineProcess(module, silence_s=0.2)

    async def act() -> bool:
        await process.start({"mood": "news"}, timeout_s=60)
        await asyncio.sleep(0.6)
        try:
            return bool((await asyncio.wait_for(process.call({}, lambda _: None), 60))["done"])
        finally:
            await process.close()

    assert asyncio.run(act())
