"""Ports: whether one is free, and who has it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from batchmill_ops.ports import is_free, listener, taken


def test_a_port_in_use_names_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        me = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"

        assert not is_free(port)
        assert listener(port) == me
        assert str(taken(port, "--port")).startswith(f"port {port} is taken by {me}; end that")


def test_a_port_that_nobody_has_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    assert is_free(port)
    assert listener(port) is None
