"""An engine's own process, seen from the worker's event loop: start it, ask it, notice its death.

An engine gets a process of its own where its library computes with Python's lock held: inside the worker it would
stop the event loop, the heartbeat and the recorder for the length of each step. It ends by itself when its worker is
gone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from .frames import HEADER, Frame, encode
from .process_group import end_group

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 20.0
_LOOKS = 10  # how often a silence is looked at before it is one


class ProcessLost(Exception):
    """The process ended or could not start; the message says how."""


class DeviceLost(ProcessLost):
    """The process ended because its device is lost: no call is to blame."""


class EngineProcess:
    """One child process ``python -m module`` and the calls that wait for it. Belongs to one event loop.

    The first message sent is the configuration; the first that comes back is ``{"ready": {…}}`` or
    ``{"failed": "reason"}``. A call is a message with an ``id``; every message that comes back for it carries the id,
    and the one with ``done`` ends it. ``{"id": …, "cancel": true}`` abandons a call. A message without an id is news
    of the engine itself and goes to ``on_news``; ``{"died": reason, "device_lost": …}`` says why the process ends now.

    While it computes, a process sends something at least every few seconds, and only if it came further. One that has
    calls and says nothing for ``silence_s`` hangs: it is killed, and its calls raise ProcessLost.
    """

    def __init__(
        self, module: str, on_news: Callable[[Frame], None] | None = None, *, silence_s: float = 600.0
    ) -> None:
        self._module = module
        self._on_news = on_news
        self._silence_s = silence_s
        self._heard_s = 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._calls: dict[int, tuple[asyncio.Future[Frame], Callable[[Frame], None]]] = {}
        self._last_id = 0
        self._lost: str | None = "the engine's process is not started"
        self._died: ProcessLost | None = None  # what it said itself
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._lost is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def killed(self) -> bool:
        """Whether another ended it by signal 9, as the host's kernel ends who takes too much memory."""
        by_us = self._died is not None
        return self._process is not None and self._process.returncode == -signal.SIGKILL and not by_us

    async def start(self, configuration: Mapping[str, Any], *, timeout_s: float) -> Frame:
        """Starts the process and waits until it is ready. Raises ProcessLost with its reason if it is not.

        Raises TypeError, before anything is started, for a configuration that JSON cannot hold.
        """
        encode(configuration)
        try:
            reader = await self._launch()
            self._send(configuration)
            async with asyncio.timeout(timeout_s):
                first = await _read(reader)
        except TimeoutError:
            await self.close()
            raise ProcessLost(f"the engine's process was not ready within {timeout_s:.0f} s") from None
        except (EOFError, OSError) as fault:
            how = await self._ending()
            raise ProcessLost(how or f"the engine's process cannot be started: {fault}") from None
        except asyncio.CancelledError:
            await self.close()
            raise
        if "ready" not in first:
            await self.close()
            raise ProcessLost(str(first.get("failed")))
        self._lost = None
        self._listener = asyncio.create_task(self._listen(reader))
        self._watcher = asyncio.create_task(self._watch())
        return dict(first["ready"])

    async def call(self, frame: Mapping[str, Any], on_message: Callable[[Frame], None]) -> Frame:
        """Sends one call and returns its last message; those before go to ``on_message``.

        Cancelling it abandons the call in the process too. Raises ProcessLost, and TypeError for what JSON cannot hold.
        """
        if self._lost is not None:
            raise ProcessLost(self._lost)
        if not self._calls:
            self._heard_s = time.monotonic()  # its silence before had no reason to end
        self._last_id += 1
        number = self._last_id
        self._send({"id": number, **frame})
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[number] = (future, on_message)
        try:
            return await future
        except asyncio.CancelledError:
            if self._calls.pop(number, None) is not None:
                self._send({"id": number, "cancel": True})
            raise

    async def close(self) -> None:
        """Ends the process and waits until it is gone; calls still waiting raise ProcessLost. Idempotent."""
        self._fail_calls(ProcessLost("the engine is closed"))
        for task in (self._listener, self._watcher):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._ending()

    async def _launch(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = _spawn(self._module, theirs.fileno())
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:  # cancelled as well: a process that was started sees the channel close, and ends
            ours.close()
            raise
        return reader

    def _send(self, frame: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(encode(frame))

    async def _watch(self) -> None:
        """Kills a process that hangs. What reads its messages then sees its end, and fails the calls.

        It has to be silent at two looks: after this process itself was stopped, messages may lie unread at the first.
        """
        was_silent = False
        while self._lost is None:
            await asyncio.sleep(self._silence_s / _LOOKS)
            is_silent = bool(self._calls) and time.monotonic() - self._heard_s >= self._silence_s
            if is_silent and was_silent:
                self._end_hanging()
                return
            was_silent = is_silent

    def _end_hanging(self) -> None:
        self._died = ProcessLost(
            f"the engine hangs: it came no further for {self._silence_s:g} s and was ended (if a step of it can take "
            "that long, raise timeout_s)"
        )
        log.error("engine_hangs module=%s calls=%d silence_s=%g", self._module, len(self._calls), self._silence_s)
        if self._process is not None:
            self._process.kill()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await _read(reader)
                self._heard_s = time.monotonic()
                self._deliver(frame)
        except (EOFError, OSError):
            how = await self._ending()
            self._fail_calls(self._died or ProcessLost(how))
        except Exception as fault:  # calls must not wait for ever for a process that nobody listens to any more
            log.exception("engine_message_not_taken module=%s", self._module)
            self._fail_calls(ProcessLost(f"a message of the engine's process cannot be taken: {fault!r}"))
            await self._ending()

    def _deliver(self, frame: Frame) -> None:
        number = frame.get("id")
        if "died" in frame:
            self._died = (DeviceLost if frame.get("device_lost") else ProcessLost)(frame["died"])
        elif number is None and self._on_news is not None:
            self._on_news(frame)
        if number not in self._calls:  # cancelled meanwhile
            return
        future, on_message = self._calls[number]
        if not frame.get("done"):
            on_message(frame)
            return
        del self._calls[number]
        if not future.done():
            future.set_result(frame)

    def _fail_calls(self, fault: ProcessLost) -> None:
        if self._lost is None or self._process is None:
            self._lost = str(fault)
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(type(fault)(str(fault)))  # one of its own: each grows a traceback

    async def _ending(self) -> str:
        """Closes the channel, which ends the process if it lives; says how it ended."""
        if self._writer is not None:
            self._writer.close()
            await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)
        return "" if self._process is None else await asyncio.to_thread(_reap, self._process)


def _spawn(module: str, channel: int) -> subprocess.Popen[bytes]:
    """A session of its own: what it starts is ended with it, and a Ctrl-C at the terminal reaches the worker alone."""
    command = [sys.executable, "-P", "-m", module, str(channel)]
    return subprocess.Popen(command, pass_fds=[channel], stdin=subprocess.DEVNULL, start_new_session=True)


async def _read(reader: asyncio.StreamReader) -> Frame:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    frame: Frame = orjson.loads(await reader.readexactly(length))
    return frame


def _reap(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    end_group(process.pid)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
    return f"the engine's process {how}"
