"""The simulated provider in a child process, for tests and benchmarks. It ends with its parent, however that ends."""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from batchmill_core.errors import ConfigurationError

from .command import arguments_of
from .config import SimulatorConfig

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0


class SimulatorHandle:
    """A running simulator: ``base_url`` ends in ``/v1``; ``process`` is there for tests that kill or freeze it."""

    def __init__(self, process: subprocess.Popen[str], base_url: str) -> None:
        self.process = process
        self.base_url = base_url
        self._address = urlsplit(base_url).netloc

    def bill(self, *, calls: bool = False) -> dict[str, Any]:
        """The provider's bill; with ``calls``, ``per_call`` lists what arrived, oldest first."""
        return self._ask("GET", "/bill?calls=1" if calls else "/bill")

    def reset(self) -> None:
        """Clears the bill."""
        self._ask("POST", "/reset")

    def stop(self) -> None:
        """Ends the process and waits for it. Idempotent."""
        _stop(self.process)

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._address, timeout=30)
        try:
            connection.request(method, path)
            answered: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answered


@contextmanager
def simulated(config: SimulatorConfig | None = None, *, port: int = 0) -> Iterator[SimulatorHandle]:
    """Runs a simulator for the length of a ``with`` block. Raises ConfigurationError when it does not start."""
    arguments = ["--with-parent", f"--port={port}", *arguments_of(config or SimulatorConfig())]
    process = subprocess.Popen(
        [sys.executable, "-m", "batchmill_ops.simulator", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield SimulatorHandle(process, _base_url(process))
    finally:
        _stop(process)


def _base_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("listening on "):
        raise ConfigurationError(f"the simulator did not start (exit code {process.poll()}); its stderr says why.")
    return line.removeprefix("listening on ").strip()


def _stop(process: subprocess.Popen[str]) -> None:
    """Closing its standard input asks the child to end; one that is frozen or stuck is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
