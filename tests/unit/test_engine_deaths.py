"""An engine's process that knows why it ends says so: its calls carry the reason, and a lost device blames none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import CallError, EngineDown, EngineLost
from batchmill_core.request import Request
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.hosted import HostedEngine

PROCESS = """
import socket, sys
from batchmill_workers.gpu.frames import Channel

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
(configuration,) = channel.receive(wait=True)
channel.send({"ready": {}})
channel.receive(wait=True)
if configuration["last"] is not None:
    channel.send(configuration["last"])
"""


class Dying(HostedEngine):
    """Its process ends at the first call, with the last message that it is told to send."""

    kind = "dying"
    process_module = "a_dying_process"
    last: Frame | None = None

    def configuration(self) -> Frame:
        return {"last": self.last}

    def message(self, request: Request) -> Frame:
        return {}


def death(last: Frame | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CallError:
    (folder / "a_dying_process.py").write_text(PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    engine = Dying(
        model=ModelEntry(name="m", engine="dying", source=str(folder), context_tokens=8), device="cpu", capacity_rows=1
    )
    engine.last = last

    async def run() -> None:
        await engine.start()
        try:
            await engine.complete(Request(messages=({"role": "user", "content": "Hi"},)))
        finally:
            await engine.close()

    with pytest.raises(CallError) as raised:
        asyncio.run(run())
    return raised.value


def test_a_call_tells_why_the_process_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = death({"died": "the cause"}, tmp_path, monkeypatch)

    assert type(error) is EngineLost
    assert error.message == "model m: the cause"


def test_a_process_that_says_nothing_is_told_by_its_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = death(None, tmp_path, monkeypatch)

    assert type(error) is EngineLost
    assert error.message == "model m: the engine's process ended with exit status 0"


def test_a_lost_device_blames_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = death({"died": "uncorrectable ECC error", "device_lost": True}, tmp_path, monkeypatch)

    assert type(error) is EngineDown
    assert error.message == "model m: uncorrectable ECC error"
