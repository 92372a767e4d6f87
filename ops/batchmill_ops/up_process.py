"""The process behind ``batchmill up``: a user of the stack that starts workers for whatever queue has work.

Started by ``up.start`` as ``python -m batchmill_ops.up_process HOME FD WISH``; FD is a connection on which it says that
all runs, or why not. SIGTERM drains and ends; a second one ends at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from batchmill_core.errors import BatchmillError, ConfigurationError, JobStopped
from batchmill_core.settings import Settings, load_settings
from batchmill_db import doorbells
from batchmill_db.session import DatabaseError

from .flower_child import FlowerChild
from .flower_folder import LOOKING_S
from .stack import Stack, attach
from .stack_folder import LockTaken, exclusive
from .stack_link import Link, LinkLost
from .up import UpFolder, Wish, parse_wish

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class UpProcess:
    """Keeps one stack, and one Flower if it is wished for."""

    def __init__(self, settings: Settings, wish: Wish) -> None:
        self._settings = settings
        self._wish = wish
        self._folder = UpFolder(path=settings.state_folder)
        self._told = threading.Event()
        self._served: set[str] = set()
        self._said: set[str] = set()

    def run(self, link: Link) -> None:
        """Starts everything, says so, and stays until it is told to end. Raises BatchmillError when it cannot start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._tell())
        self._folder.state_file.unlink(missing_ok=True)
        stack = attach(self._settings)
        flower = FlowerChild(self._settings, self._wish.flower) if self._wish.flower else None
        try:
            self._check_port(stack)
            if flower is not None:
                flower.start(stack.broker_url)
            self._note()
            with suppress(LinkLost):  # whoever started it has gone: it runs all the same
                link.send({"ready": True})
            link.close()
            self._stay(stack, flower)
        finally:
            self._end(stack, flower)

    def _tell(self) -> None:
        if self._told.is_set():
            raise KeyboardInterrupt
        self._told.set()

    def _check_port(self, stack: Stack) -> None:
        port = _port(stack)
        if self._wish.port not in (None, port):
            raise ConfigurationError(f"port {self._wish.port} was taken meanwhile; give another --port")

    def _note(self) -> None:
        new = self._folder.state_file.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid()}))
        new.replace(self._folder.state_file)

    def _stay(self, stack: Stack, flower: FlowerChild | None) -> None:
        while not self._told.wait(_LOOK_EVERY_S):
            try:
                self._serve(stack)
                if flower is not None:
                    flower.keep(stack.broker_url)
            except JobStopped as stop:
                log.warning("stack_was_stopped reason=%s", stop)
                return
            except BatchmillError as fault:
                log.warning("looked_in_vain error=%s", fault)

    def _serve(self, stack: Stack) -> None:
        """Workers for each queue that has work; asking also starts a stack again that died."""
        for reason in set(stack.unfit()) - self._said:
            self._said.add(reason)
            log.error("queue_not_served reason=%s", reason)
        try:
            queues = stack.database.read(doorbells.queues_with_work).keys() - self._served
        except DatabaseError as fault:
            log.warning("work_not_seen error=%s", fault)
            return
        if queues:
            stack.serve(sorted(queues))
            self._served |= queues
            log.info("serves queues=%s", ",".join(sorted(self._served)))

    def _end(self, stack: Stack, flower: FlowerChild | None) -> None:
        try:
            stack.stop()
        except KeyboardInterrupt:
            stack.kill()
        finally:
            if flower is not None:  # last, so that it still hears of what the drain finished
                flower.stop()
            self._folder.state_file.unlink(missing_ok=True)


def _port(stack: Stack) -> int:
    return int(stack.broker_url.rpartition(":")[2].partition("/")[0])


def main(home: Path, link: Link, wish: Wish) -> int:
    """Runs until it is told to end; tells whoever started it why when it cannot."""
    settings = load_settings(home)
    folder = UpFolder(path=settings.state_folder)
    try:
        with exclusive(folder.lock_file, wait_s=LOOKING_S):
            UpProcess(settings, wish).run(link)
        return 0
    except LockTaken:
        fault: BatchmillError = ConfigurationError("`batchmill up` is running here already, or just starting")
    except BatchmillError as error:
        fault = error
    log.error("up_failed error=%s", fault)
    with suppress(LinkLost):
        link.send({"error": str(fault)})
    return 2


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    sys.exit(main(Path(sys.argv[1]), Link(socket.socket(fileno=int(sys.argv[2]))), parse_wish(sys.argv[3])))
