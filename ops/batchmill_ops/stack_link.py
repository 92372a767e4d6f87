"""One connection between a user and the stack's process: JSON lines over a Unix socket, closed when either dies."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Message = dict[str, Any]

_PIECE_BYTES = 65_536
_BACKLOG = 64


class LinkLost(Exception):
    """The other side has gone, or does not answer in time."""


class Link:
    """One end of a connection. Used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = b""

    def send(self, message: Message) -> None:
        """Raises LinkLost when nobody is there."""
        try:
            self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError as fault:
            raise LinkLost(str(fault)) from fault

    def receive(self, *, timeout_s: float | None = None) -> Message | None:
        """The next message; None when the other side has closed. Raises LinkLost after ``timeout_s``."""
        self._end.settimeout(timeout_s)
        try:
            while b"\n" not in self._buffer:
                piece = self._end.recv(_PIECE_BYTES)
                if not piece:
                    return None
                self._buffer += piece
        except ConnectionError:
            return None
        except OSError as fault:
            raise LinkLost(f"no answer within {timeout_s} s: {fault}") from fault
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def ask(self, message: Message, *, timeout_s: float) -> Message:
        """One question and its answer. Raises LinkLost."""
        self.send(message)
        answer = self.receive(timeout_s=timeout_s)
        if answer is None:
            raise LinkLost("closed without an answer")
        return answer

    def messages(self) -> Iterator[Message]:
        """All messages until the other side closes or dies."""
        while (message := self.receive()) is not None:
            yield message

    def close(self) -> None:
        self._end.close()


def connect(path: Path, *, timeout_s: float) -> Link | None:
    """A connection to whoever listens at ``path``; None when nobody does. Raises LinkLost when its queue is full."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(timeout_s)
    try:
        with _short(path) as address:
            end.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        end.close()
        return None
    except OSError as fault:
        end.close()
        raise LinkLost(str(fault)) from fault
    return Link(end)


def listen(path: Path) -> socket.socket:
    """Listens at ``path``, for its user alone; what a dead process left there is replaced."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as address:
        listener.bind(address)
    path.chmod(0o600)  # its folder is closed to others already
    listener.listen(_BACKLOG)
    return listener


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of at most 107 bytes for a socket's path, which is all the kernel takes, however deep its folder is."""
    if not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    except FileNotFoundError:
        raise FileNotFoundError(path) from None
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
