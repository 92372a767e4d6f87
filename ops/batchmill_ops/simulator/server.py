"""The simulated provider as a server: in a running loop (Simulator) or as a whole process (run_simulator)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from batchmill_core.errors import ConfigurationError

from .config import SimulatorConfig
from .connection import HttpConnection
from .provider import Provider

_BACKLOG = 4096


class Simulator:
    """One simulated provider; start and close it from one event loop."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._provider = Provider(config, now_s=time.monotonic)
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens, and returns the port (a free one for 0). Raises ConfigurationError when the address cannot be had."""
        loop = asyncio.get_running_loop()
        respond, connections = self._provider.respond, self._connections
        try:
            self._server = await loop.create_server(
                lambda: HttpConnection(respond, connections), host, port, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host} port {port}: {error.strerror}. Choose another port, or 0 for a free one."
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stops listening and drops every connection, hanging ones too. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        self._server = None


def run_simulator(
    config: SimulatorConfig,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    ready_file: Path | None = None,
    with_parent: bool = False,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, or until standard input closes when ``with_parent`` is set.

    When it listens, it announces ``listening on http://HOST:PORT/v1`` (by default on stdout) and writes that URL to
    ``ready_file``, in one step.
    """
    serving = _serve(config, host, port, ready_file, with_parent, announce or _say)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serving)


async def _serve(
    config: SimulatorConfig,
    host: str,
    port: int,
    ready_file: Path | None,
    with_parent: bool,
    announce: Callable[[str], None],
) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    if with_parent:
        loop.add_reader(sys.stdin.fileno(), _watch_parent, stopped)
    simulator = Simulator(config)
    bound = await simulator.start(host, port)
    try:
        url = f"http://{host}:{bound}/v1"
        if ready_file is not None:
            _write_whole(ready_file, url + "\n")
        announce(f"listening on {url}")
        await stopped.wait()
    finally:
        await simulator.close()


def _watch_parent(stopped: asyncio.Event) -> None:
    """Nothing is ever written to the pipe: when it can be read, its other end is closed."""
    with suppress(OSError):
        if os.read(sys.stdin.fileno(), 1024):
            return
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    stopped.set()


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # not there on Windows
    except ImportError:
        return None
    return uvloop.new_event_loop
