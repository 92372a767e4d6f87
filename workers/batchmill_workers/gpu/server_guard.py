"""Stands between a worker and a server of the user's own: starts it, bounds its log, ends all of it with the worker.

Run by its path as ``python -I -S server_guard.py CHANNEL LOG COMMAND…``: it needs the standard library alone, so that
it is there within milliseconds and holds little memory. CHANNEL is the number of an inherited socket to the worker
that carries lines of JSON. It says ``{"pid": …}`` or ``{"failed": "reason"}``, later ``{"ended": status}`` (negative:
the signal), and closes when nothing of the server is left. It hears ``{"stop": signal, "grace_s": seconds}``; a channel
that closes means that the worker is gone, however it went.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ORPHAN_GRACE_S = 2.0  # what a server gets to end in when its worker was killed, or its own first process died
LOG_BYTES = 16 << 20  # the older half is kept beside it under .1
_POLL_S = 0.05
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36  # what the server leaves behind becomes the guard's, so that it can be ended


class _Log:
    """The server's output, in a file that starts anew when it is full. What a full disk does not take is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        try:
            self._write(piece)
        except OSError:
            return

    def _write(self, piece: bytes) -> None:
        if self._file.tell() + len(piece) > LOG_BYTES:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab", buffering=0)
        self._file.write(piece)


class Guard:
    """One server from start to end."""

    def __init__(self, channel: socket.socket, log: _Log) -> None:
        self._channel = channel
        self._log = log
        self._heard = b""
        self._deadline: float | None = None  # when what still runs is killed
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._output = -1
        self.pid = 0

    def run(self, command: list[str]) -> None:
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        if not self._start(command):
            return
        for source in (self._channel.fileno(), self._output, wake.fileno()):
            self._selector.register(source, selectors.EVENT_READ)
        while not (self._ended and self._all_gone()):
            for key, _ in self._selector.select(self._wait_s()):
                self._take(key.fd, wake)
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
        self._copy_output()

    def _start(self, command: list[str]) -> bool:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._output = reading
        myself = os.getpid()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=lambda: _die_with(myself),  # noqa: PLW1509  # this process has one thread
            )
        except (OSError, ValueError) as fault:
            reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
            self._say({"failed": f"{command[0]!r} cannot be started: {reason}"})
            return False
        os.close(writing)
        self.pid = process.pid
        process.returncode = 0  # it is waited for here, not by subprocess
        self._say({"pid": self.pid})
        return True

    def _wait_s(self) -> float | None:
        return None if self._deadline is None else _POLL_S

    def _take(self, source: int, wake: socket.socket) -> None:
        if source == self._output:
            self._copy_output()
        elif source == self._channel.fileno():
            self._hear()
        else:
            wake.recv(_READ_BYTES)

    def _hear(self) -> None:
        try:
            piece = self._channel.recv(_READ_BYTES)
        except OSError:
            piece = b""
        self._heard += piece
        if not piece:
            self._selector.unregister(self._channel.fileno())
            self._end(signal.SIGTERM, ORPHAN_GRACE_S)
        elif b"\n" in self._heard:
            asked = json.loads(self._heard.partition(b"\n")[0])
            self._heard = b""
            self._end(asked["stop"], asked["grace_s"])

    def _copy_output(self) -> None:
        while True:
            try:
                piece = os.read(self._output, _READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                if self._output in self._selector.get_map():
                    self._selector.unregister(self._output)
                return
            self._log.write(piece)

    def _end(self, number: int, grace_s: float) -> None:
        self._signal(number)
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self._ended = True
                self._say({"ended": os.waitstatus_to_exitcode(status)})
                self._end(signal.SIGTERM, ORPHAN_GRACE_S)

    def _all_gone(self) -> bool:
        if _children():
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):  # those of other users are out of reach
            return True
        return False

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for child in _children():
            _kill_one(child)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _say(self, line: dict[str, object]) -> None:
        try:
            self._channel.sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            return  # the worker is gone, and there is nobody to tell


def _kill_one(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _children() -> list[int]:
    """This process's children, those that it adopted included; none where the system does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    call = getattr(ctypes.CDLL(None), "prctl", None)
    if call is not None:
        call(option, value)


def _die_with(guard: int) -> None:
    """In the server's process, before it becomes the server: it dies with the guard, even when that is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)


def main(arguments: list[str]) -> None:
    channel, log, *command = arguments
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=int(channel)) as worker:
        Guard(worker, _Log(Path(log))).run(command)


if __name__ == "__main__":
    main(sys.argv[1:])
