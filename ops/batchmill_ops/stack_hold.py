"""One user's connection to the process of a folder's stack: found or started, asked, left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from batchmill_core.errors import BatchmillError, ConfigurationError
from batchmill_core.settings import HOME_VARIABLE, PREFIX, SECRETS, Settings, redacted_url

from .stack_folder import LockTaken, StackFolder, exclusive, tail, unusable
from .stack_link import Link, LinkLost, Message, connect
from .valkey_server import server_binary

_CONNECT_S = 10.0
_START_S = 60.0
_ANSWER_S = 60.0  # starting workers imports what they need, on a busy host too
_BEYOND_GRACE_S = 30.0
_END_S = 5.0
_HURRY_EVERY_S = 0.3
_POLL_S = 0.01


class Hold:
    """A connection that counts as a user until it is left, closed, or its process dies."""

    def __init__(self, link: Link, hello: Message) -> None:
        self.broker_url: str = hello["broker_url"]
        self.database: str = hello["database"]
        self._pid: int = hello["pid"]
        self._link = link
        self._lock = threading.Lock()

    def ask(self, message: Message) -> Message:
        """One question and its answer. Raises LinkLost when the stack's process is gone, BatchmillError when it fails."""
        with self._lock:
            answer = self._link.ask(message, timeout_s=_ANSWER_S)
        if "error" in answer:
            raise BatchmillError(f"the stack failed ({answer['error']}); see logs/stack.log in its folder")
        return answer

    def leave(self, *, grace_s: float) -> None:
        """Says goodbye and waits until the stack goes on with others or has ended."""
        with self._lock, suppress(LinkLost):  # lost: it ended by itself, or is stuck
            self._link.send({"op": "leave", "grace_s": grace_s})
            if self._link.receive(timeout_s=grace_s + _BEYOND_GRACE_S) is not None:
                return
        if not _ended(self._pid, within_s=_END_S):
            _kill_tree(self._pid)

    def hurry(self, folder: StackFolder) -> None:
        """Leaves without waiting for calls in flight, also when ``leave`` was interrupted.

        A process that does not even do that is killed with its children, unless others use it.
        """
        with suppress(LinkLost):
            self._link.send({"op": "leave", "grace_s": 0.0})
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            _ask_to_hurry(folder)
            try:
                if self._link.receive(timeout_s=_HURRY_EVERY_S) is not None:
                    return
                break
            except LinkLost:
                continue
        if not _ended(self._pid, within_s=_END_S):
            _kill_tree(self._pid)

    def close(self) -> None:
        self._link.close()


def take_hold(settings: Settings, folder: StackFolder) -> Hold:
    """Joins the folder's stack, or starts one. Of users that race, one starts it. Raises ConfigurationError."""
    try:
        hold = _join(folder)
        if hold is None:
            with exclusive(folder.starting_lock, wait_s=_START_S):
                hold = _join(folder) or _start(settings, folder)
    except LinkLost as fault:
        pid = folder.read_state().get("pid", "unknown")
        raise ConfigurationError(
            f"the stack of {folder.path} (process {pid}) does not answer ({fault}); end that process and try again"
        ) from fault
    except LockTaken as fault:
        raise ConfigurationError(
            f"another process has been starting the stack for {_START_S:.0f} s: {fault}"
        ) from fault
    except OSError as fault:
        raise unusable(folder.path, fault) from fault
    if hold.database != redacted_url(settings.database_address):
        hold.close()
        raise ConfigurationError(
            f"the stack that runs in {folder.path} uses the database {hold.database}, not "
            f"{redacted_url(settings.database_address)}; end its runs first, or set BATCHMILL_HOME to another folder"
        )
    return hold


def status(folder: StackFolder) -> Message | None:
    """What runs in the folder; None when nothing does. Joins nothing, changes nothing."""
    with suppress(LinkLost, OSError):
        link = connect(folder.socket, timeout_s=_CONNECT_S)
        if link is not None:
            try:
                return link.ask({"op": "status"}, timeout_s=_CONNECT_S)
            finally:
                link.close()
    return None


def _join(folder: StackFolder) -> Hold | None:
    """None when no stack runs, or when it is about to end."""
    link = connect(folder.socket, timeout_s=_CONNECT_S)
    if link is None:
        return None
    try:
        link.send({"op": "join"})
        hello = link.receive(timeout_s=_CONNECT_S)
    except LinkLost:
        link.close()
        if _ended(folder.read_state().get("pid", 0), within_s=0):
            return None
        raise
    if hello is None or "broker_url" not in hello:
        link.close()
        return None
    return Hold(link, hello)


def _start(settings: Settings, folder: StackFolder) -> Hold:
    server_binary()
    mine, its = socket.socketpair()
    log_file = folder.logs / "stack.log"
    with its, log_file.open("ab") as output:
        process = subprocess.Popen(
            _command(settings, its.fileno()),
            cwd=settings.home,
            env=_environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(its.fileno(),),
            start_new_session=True,  # Ctrl-C and a closed terminal reach the user's process only
        )
    # Reaps it whenever it ends: this user may leave first and live on.
    threading.Thread(target=process.wait, name="stack-reaper", daemon=True).start()
    link = Link(mine)
    hello = link.receive(timeout_s=_START_S)
    if hello is None or "error" in hello:
        link.close()
        said = (
            f"the embedded stack did not start; {log_file} ends: {tail(log_file)}" if hello is None else hello["error"]
        )
        raise ConfigurationError(said)
    return Hold(link, hello)


def _command(settings: Settings, fd: int) -> list[str]:
    # -P: a file of the user's folder must not be imported in the place of a library of the same name.
    start = [sys.executable, "-P", "-m", "batchmill_ops.stack_process"]
    return [*start, str(settings.home), str(fd), redacted_url(settings.database_address)]


def _environment(settings: Settings) -> dict[str, str]:
    """This process's environment with its settings, so that arguments of ``connect`` reach the workers too."""
    left_out = {"home", "broker_url", "catalog", *SECRETS}
    given = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in left_out}
    ours = {PREFIX + name.upper(): str(value) for name, value in given.items() if value is not None}
    others = {name: value for name, value in os.environ.items() if name != f"{PREFIX}BROKER_URL"}
    return {**others, **ours, HOME_VARIABLE: str(settings.home)}


def _ask_to_hurry(folder: StackFolder) -> None:
    with suppress(LinkLost, OSError):
        link = connect(folder.socket, timeout_s=1)
        if link is not None:
            try:
                link.ask({"op": "hurry"}, timeout_s=1)
            finally:
                link.close()


def _ended(pid: int, *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while _exists(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _exists(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except (FileNotFoundError, PermissionError):
        return not Path("/proc/self").exists()


def _kill_tree(pid: int) -> None:
    """Ends a stuck stack process; its children first, while they can still be found through it."""
    children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in _words(file)]
    for number in [*children, pid]:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    _ended(pid, within_s=_END_S)


def _words(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().split()
    return []
