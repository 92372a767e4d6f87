"""A server's process, seen from the worker's event loop: start it, hear of its end, end it with all its children."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from . import server_guard

_CLOSE_EXTRA_S = 10.0


class ServerLost(Exception):
    """The server's process could not start, ended or was given up; the message says how."""


async def wait_unless_lost(over: asyncio.Future[str], pause_s: float) -> None:
    """Waits, and raises ServerLost if the server is lost by the end of it; ``over`` then holds the reason."""
    await asyncio.wait([over], timeout=pause_s)
    if over.done():
        raise ServerLost(over.result())


class ServerProcess:
    """One run of a command under its guard. Belongs to one event loop.

    ``ended`` is done, with how, as soon as the command's own process has ended; what that left behind is ended too,
    and gone when ``stop`` returns.
    """

    def __init__(self, guard: subprocess.Popen[bytes], writer: asyncio.StreamWriter, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._guard = guard
        self._writer = writer
        self._listener: asyncio.Task[None] | None = None
        self._stopped = False

    @classmethod
    async def start(cls, command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> ServerProcess:
        """Starts the command with this environment, its output going to ``log``. Raises ServerLost when it cannot."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, _opened(log) as output:
                guard = _spawn(command, environment, log, theirs.fileno(), output)
        except (OSError, ServerLost) as fault:
            ours.close()
            raise ServerLost(f"it cannot be started: {fault}") from fault
        writer = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            first = await _line(reader)
            if "pid" not in first:
                raise ServerLost(first.get("failed", f"its guard ended at once; {log} says why"))
        except BaseException:  # cancelled as well: the guard sees the channel close, and ends what it has started
            ours.close() if writer is None else writer.transport.abort()
            await asyncio.shield(asyncio.to_thread(guard.wait))
            raise
        process = cls(guard, writer, first["pid"])
        process._listener = asyncio.create_task(process._listen(reader))
        return process

    async def stop(self, *, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Sends the signal, kills what is left after ``grace_s``, and waits until nothing is. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._writer.write(json.dumps({"stop": number, "grace_s": grace_s}).encode() + b"\n")
        try:
            await asyncio.to_thread(self._guard.wait, grace_s + _CLOSE_EXTRA_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            await asyncio.to_thread(self._guard.wait)
            _kill_group(self.pid)
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while said := await _line(reader):
            if "ended" in said:
                self._note(how_it_ended(said["ended"]))
        if not self.ended.done():
            _kill_group(self.pid)
            self._note("its guard was killed, and it with it")

    def _note(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


def how_it_ended(status: int) -> str:
    """An exit status in words; negative ones are signals."""
    if status >= 0:
        return f"the server ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "an unknown one"
    return f"the server was killed by signal {-status} ({name})"


def _opened(log: Path) -> BinaryIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as fault:
        raise ServerLost(
            f"its log {log} cannot be written: {fault.strerror or fault}; name another as log_file"
        ) from fault


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], log: Path, channel: int, output: BinaryIO
) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C at the terminal reaches the worker alone, which drains first."""
    guard = [sys.executable, "-I", "-S", str(Path(server_guard.__file__)), str(channel), str(log), *command]
    return subprocess.Popen(
        guard,
        env=environment,
        pass_fds=[channel],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


async def _line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next thing that the guard says; empty when it is gone."""
    try:
        line = await reader.readline()
    except OSError:
        return {}
    said: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return said


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
