"""``batchmill up`` and ``down``: the embedded stack kept running by a process of its own, until it is told to end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import HOME_VARIABLE, Settings

from .flower import Place
from .flower_folder import FlowerFolder, Running, is_held
from .ports import is_free, taken
from .stack_folder import StackFolder, tail, unusable
from .stack_hold import status
from .stack_link import Link
from .waits import Remedy, resume_here, start_a_worker, wait_for_own

_START_S = 120.0  # a stack and a Flower, on a busy host
_END_BEYOND_DRAIN_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to start. ``port`` is the broker's, None for any free one; ``flower`` None for no Flower."""

    port: int | None = None
    flower: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What ``batchmill up`` keeps running here."""

    pid: int
    broker_port: int
    flower: Running | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFolder:
    """The files of the process behind ``batchmill up``."""

    path: Path

    @property
    def lock_file(self) -> Path:
        """Held as long as that process lives."""
        return self.path / "up.lock"

    @property
    def state_file(self) -> Path:
        return self.path / "up.json"

    @property
    def log_file(self) -> Path:
        return self.path / "logs" / "up.log"


def standing(settings: Settings) -> Standing | None:
    """What runs in this folder by ``batchmill up``; None when nothing does, or when it is just starting."""
    folder = UpFolder(path=settings.state_folder)
    if not is_held(folder.lock_file):
        return None
    try:
        found = json.loads(folder.state_file.read_text())
    except (OSError, ValueError):
        return None
    return Standing(
        pid=found["pid"],
        broker_port=StackFolder(path=settings.state_folder).read_state().get("port", 0),
        flower=FlowerFolder(path=settings.state_folder).running(),
    )


def remedy_here(settings: Settings) -> Remedy:
    """What to do when no live worker serves a queue, for jobs that this process does not see through itself."""
    if not settings.embedded:
        return start_a_worker
    return resume_here if standing(settings) is None else wait_for_own


def start(settings: Settings, wish: Wish) -> Standing:
    """Starts what is wished for and returns once all of it answers. Raises ConfigurationError when it cannot."""
    if not settings.embedded:
        raise ConfigurationError(
            "broker_url is configured, so there is no embedded stack to keep running; start `batchmill worker api` or "
            "`batchmill worker gpu`, and `batchmill flower`, or unset broker_url (BATCHMILL_BROKER_URL)"
        )
    if wish.flower is not None and find_spec("flower") is None:
        raise ConfigurationError("Flower is not installed; pip install 'batchmill[flower]', or add --no-flower")
    stack_folder = StackFolder(path=settings.state_folder)
    stack_folder.prepare()
    _check_flower_port(settings, wish)
    _claim_port(stack_folder, wish)
    try:
        link = _spawn(settings, wish)
    except OSError as fault:
        raise unusable(stack_folder.path, fault) from fault
    try:
        answer = link.receive(timeout_s=_START_S)
    finally:
        link.close()
    if answer is None or "error" in answer:
        log_file = UpFolder(path=settings.state_folder).log_file
        raise ConfigurationError(
            answer["error"] if answer else f"it ended while it started; {log_file} ends: {tail(log_file)}"
        )
    found = standing(settings)
    if found is None:
        raise ConfigurationError("it ended as soon as it had started; see logs/up.log in .batchmill")
    return found


def _check_flower_port(settings: Settings, wish: Wish) -> None:
    if wish.flower is None:
        return
    running = FlowerFolder(path=settings.state_folder).running()
    if running is not None:
        raise ConfigurationError(
            f"Flower runs here already, at {running.url} (process {running.pid}); stop it first, or add --no-flower"
        )
    if wish.flower.port and not is_free(wish.flower.port, wish.flower.address):
        raise taken(wish.flower.port, "--flower-port")


def _claim_port(folder: StackFolder, wish: Wish) -> None:
    """Leaves the wished port where the stack's process looks for the one of its predecessor."""
    if wish.port is None:
        return
    state = folder.read_state()
    if status(folder) is not None:
        if state.get("port") != wish.port:
            raise ConfigurationError(
                f"the stack runs already, on port {state.get('port')}, for a `batchmill run` or a program; leave out "
                "--port to join it, or let that end first"
            )
        return
    if not is_free(wish.port):
        raise taken(wish.port, "--port")
    folder.write_state({**state, "port": wish.port})


def _spawn(settings: Settings, wish: Wish) -> Link:
    mine, its = socket.socketpair()
    log_file = UpFolder(path=settings.state_folder).log_file
    # -P: a file of the user's folder must not be imported in the place of a library of the same name.
    command = [sys.executable, "-P", "-m", "batchmill_ops.up_process", str(settings.home), str(its.fileno())]
    with its, log_file.open("ab") as output:
        subprocess.Popen(
            [*command, json.dumps(asdict(wish))],
            cwd=settings.home,
            env={**os.environ, HOME_VARIABLE: str(settings.home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(its.fileno(),),
            start_new_session=True,  # it outlives this terminal
        )
    return Link(mine)


def parse_wish(text: str) -> Wish:
    """The wish that ``start`` passed to the process."""
    found: dict[str, Any] = json.loads(text)
    place = found["flower"]
    return Wish(port=found["port"], flower=None if place is None else Place(**place))


def stop(settings: Settings, *, impatient: Callable[[], None]) -> Standing | None:
    """Ends what ``batchmill up`` started and returns when it is gone; what ran, or None when nothing did.

    Calls in flight may finish within the drain time. An interrupt calls ``impatient`` and ends them at once.
    """
    lock_file = UpFolder(path=settings.state_folder).lock_file
    found = _when_started(settings, lock_file)
    if found is None:
        return None
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + settings.drain_s + _END_BEYOND_DRAIN_S
    while is_held(lock_file):
        try:
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            impatient()
            os.kill(found.pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            raise ConfigurationError(f"process {found.pid} does not end; kill it: kill -9 {found.pid}")
    return found


def _when_started(settings: Settings, lock_file: Path) -> Standing | None:
    """What runs; one that is just starting is waited for, so that it does not outlive a `down`."""
    deadline = time.monotonic() + _START_S
    while (found := standing(settings)) is None and is_held(lock_file) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found
