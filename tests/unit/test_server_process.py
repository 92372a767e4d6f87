"""A server's process under its guard: what it writes, where that goes, and what is left when it cannot start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill_workers.gpu import server_process
from batchmill_workers.gpu.server_process import ServerLost, ServerProcess
from tests.descriptors import open_sockets

PAUSE = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


async def started(command: list[str], log: Path) -> ServerProcess:
    return await ServerProcess.start(command, environment=dict(os.environ), log=log)


def guard_of(process: ServerProcess) -> subprocess.Popen[bytes]:
    return process._guard


def test_a_log_that_cannot_be_written_is_told_and_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def act() -> tuple[str, set[str]]:
        before = open_sockets()
        with pytest.raises(ServerLost) as lost:
            await started(PAUSE, tmp_path / "file" / "server.log")
        return str(lost.value), open_sockets() - before

    said, left = asyncio.run(act())

    assert "server.log cannot be written: " in said
    assert said.endswith("; name another as log_file")
    assert left == set()


def test_a_guard_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process.sys, "executable", str(tmp_path / "no-python"))

    with pytest.raises(ServerLost, match=r"it cannot be started: .*no-python"):
        asyncio.run(started(PAUSE, tmp_path / "server.log"))


def test_a_full_disk_ends_no_server() -> None:
    async def act() -> tuple[bool, int | None]:
        process = await started([sys.executable, "-c", "print('x' * 100_000, flush=True); input()"], Path("/dev/full"))
        done, _ = await asyncio.wait([process.ended], timeout=30)
        await process.stop(grace_s=5)
        return bool(done), guard_of(process).returncode

    ended_by_itself, status = asyncio.run(act())

    assert ended_by_itself  # of the end of its input, not by the guard's death
    assert status == 0
