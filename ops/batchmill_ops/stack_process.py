"""The process that a folder's embedded stack belongs to: it outlives each of its users and ends with the last one.

Its users hold a connection each, which the kernel closes when one dies, so that a killed user counts no longer. Started
by ``stack.attach`` as ``python -m batchmill_ops.stack_process HOME FD``; FD is the first user's connection.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from batchmill_core.errors import BatchmillError, ConfigurationError

from .stack_folder import LockTaken, StackFolder, exclusive, unusable
from .stack_link import Link, LinkLost, Message, listen
from .valkey_server import Valkey

if TYPE_CHECKING:
    from .stack_workers import StackWorkers

log = logging.getLogger(__name__)

_PREDECESSOR_S = 15.0  # time for a stack that just ends to let go of the folder
_WATCH_EVERY_S = 0.1


class StackProcess:
    """Valkey, workers, and the users that need them."""

    def __init__(self, home: Path, folder: StackFolder, *, database: str) -> None:
        self._home = home
        self._folder = folder
        self._database = database
        last = folder.read_state()
        # The address of a stack that crashed is used again, so that users that outlived it find the new one.
        self._valkey = Valkey(
            folder.valkey, folder.logs / "valkey.log", port=last.get("port"), password=last.get("password")
        )
        self._workers: StackWorkers | None = None
        self._users: set[int] = set()
        self._ids = itertools.count(1)
        self._closing = False
        self._lock = threading.Lock()  # of the three above; held for moments
        self._working = threading.Lock()  # of starting and draining workers; held for long
        self._over = threading.Event()
        self._told = threading.Event()

    def run(self, first: Link) -> None:
        """Serves the first user and all that join, until the last one has left and everything is stopped."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._told.set())
        try:
            self._valkey.start()
            self._note()
            listener = listen(self._folder.socket)
            self._in_thread(self._attend, first, True)
            self._in_thread(self._welcome, listener)
            self._in_thread(self._ready_workers)
            self._watch()
            self._folder.socket.unlink(missing_ok=True)
            listener.close()
        finally:
            self._valkey.stop()
        self._folder.state_file.unlink(missing_ok=True)
        log.info("stack_ended")

    def _note(self) -> None:
        valkey = self._valkey
        state = {"pid": os.getpid(), "broker_url": valkey.url, "port": valkey.port, "password": valkey.password}
        self._folder.write_state(state)
        log.info("stack_ready pid=%d port=%d valkey_pid=%s", os.getpid(), valkey.port, valkey.pid)

    def _watch(self) -> None:
        """In the main thread: the kernel ends Valkey with the thread that started it."""
        while not self._over.wait(_WATCH_EVERY_S):
            self._valkey.keep()
            if self._told.is_set():
                log.info("stack_told_to_end users=%d", len(self._users))
                with self._lock:
                    self._closing = True
                with self._working:
                    self._drain(None)
                return

    @staticmethod
    def _in_thread(work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]  # any of ours

    # users

    def _welcome(self, listener: socket.socket) -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            self._in_thread(self._attend, Link(end), False)

    def _attend(self, link: Link, joins: bool) -> None:
        """One connection from its first message to its end, however it ends."""
        user = next(self._ids)
        grace_s: float | None = None
        try:
            if joins and self._join(user):
                link.send(self._hello())
            grace_s = self._converse(user, link)
        except LinkLost:
            log.info("user_lost user=%d", user)
        finally:
            if not self._leave(user, grace_s):  # a last user's connection is closed by the end of this process
                with contextlib.suppress(LinkLost):
                    link.send({"ended": False})
                link.close()

    def _converse(self, user: int, link: Link) -> float | None:
        """Answers until the user leaves; the grace it then gives the workers, should it be the last."""
        for message in link.messages():
            if message["op"] == "leave":
                grace_s: float | None = message["grace_s"]
                return grace_s
            if message["op"] == "join" and not self._join(user):
                return None
            try:
                answer = self._answer(user, message)
            except Exception as fault:  # the edge of this process: the user waits for an answer
                log.exception("request_failed op=%s", message["op"])
                answer = {"error": f"{type(fault).__name__}: {fault}"}
            link.send(answer)
        return None

    def _join(self, user: int) -> bool:
        with self._lock:
            if not self._closing:
                self._users.add(user)
            return not self._closing

    def _hello(self) -> Message:
        return {"broker_url": self._valkey.url, "pid": os.getpid(), "database": self._database}

    def _answer(self, user: int, message: Message) -> Message:
        match message["op"]:
            case "join":
                return self._hello()
            case "serve":
                return self._serve(user, message)
            case "hurry":
                return self._hurry()
            case _:
                return self._status()

    def _serve(self, user: int, message: Message) -> Message:
        os.environ.update(message["keys"])  # a later user's shell may hold keys that the first one's did not
        workers = self._ready_workers()
        with self._working:
            workers.serve(user, message["queues"])
        return {}

    def _status(self) -> Message:
        workers = self._workers
        return {
            "users": len(self._users),
            "pid": os.getpid(),
            "valkey_pid": self._valkey.pid,
            "queues": workers.queues if workers else [],
            "worker_pids": workers.pids() if workers else [],
            "unfit": workers.unfit() if workers else [],
        }

    def _hurry(self) -> Message:
        """A user that waits for the drain wants no more of it. Others' work is left alone."""
        if not self._users and self._workers is not None:
            self._workers.kill()
        return {}

    def _leave(self, user: int, grace_s: float | None) -> bool:
        """Whether this was the last user, so that the stack ends. Users may join while the workers still drain."""
        with self._lock:
            if user not in self._users:
                return False
            self._users.remove(user)
        with self._working:
            if self._users:
                return False
            self._drain(grace_s)
            with self._lock:
                self._closing = not self._users
        if self._closing:
            self._over.set()
        return self._closing

    # workers

    def _ready_workers(self) -> StackWorkers:
        """Imports what workers need. Done beside the first user's own work: it takes longer than all the rest."""
        from .stack_workers import StackWorkers

        with self._lock:
            if self._workers is None:
                self._workers = StackWorkers(home=self._home, broker_url=self._valkey.url, logs=self._folder.logs)
            return self._workers

    def _drain(self, grace_s: float | None) -> None:
        if self._workers is not None:
            self._workers.drain(grace_s)


def main(home: Path, first: Link, *, database: str) -> int:
    """Runs the stack of a folder; tells the first user why when it cannot."""
    folder = StackFolder(path=home / ".batchmill")
    try:
        with exclusive(folder.running_lock, wait_s=_PREDECESSOR_S):
            folder.rotate_logs()
            StackProcess(home, folder, database=database).run(first)
        return 0
    except LockTaken:
        pid = folder.read_state().get("pid", "unknown")
        fault: BatchmillError = ConfigurationError(
            f"another stack of {home} runs (process {pid}) and does not answer; end that process and try again"
        )
    except OSError as error:
        fault = unusable(folder.path, error)
    except BatchmillError as error:
        fault = error
    log.error("stack_failed error=%s", fault)
    with contextlib.suppress(LinkLost):
        first.send({"error": str(fault)})
    return 2


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    sys.exit(main(Path(sys.argv[1]), Link(socket.socket(fileno=int(sys.argv[2]))), database=sys.argv[3]))
