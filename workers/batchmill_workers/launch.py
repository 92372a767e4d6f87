"""Starts worker processes on this host, one per device or as many as asked, and starts them again when they die."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, api_key
from batchmill_db import reaping, telemetry
from batchmill_db.session import Connection, Database, DatabaseError

from .gpu.listing import slots
from .node_names import distinct, mark_of, taken_names
from .parentage import DEVICE_VARIABLE, PARENT_FD_VARIABLE, RENEW_EXIT_CODE, SLOTS_VARIABLE, UNFIT_EXIT_CODE

log = logging.getLogger(__name__)

MOST_CHUNKS = 32
_FIRST_BACKOFF_S = 1.0
_MOST_BACKOFF_S = 60.0
_STEADY_S = 60.0  # a process that ran this long starts again at once
_WATCH_EVERY_S = 0.2
_KILL_AFTER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One worker process to run: its Celery node name, queues, slots and extra environment."""

    name: str
    queues: tuple[str, ...]
    slots: int
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """Celery's threads: each waits for a chunk, and chunks whose rows are all on their way lend their slots."""
        return max(MOST_CHUNKS, self.slots)

    def variables(self) -> dict[str, str]:
        """What the process needs in its environment, beside the supervisor's."""
        return {**self.environment, SLOTS_VARIABLE: str(self.slots)}

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-P",  # else a celery.py in the user's folder would stand in for the real one
            "-m",
            "celery",
            "-A",
            "batchmill_workers.tasks",
            "-q",
            "worker",
            "-P",
            "threads",
            "-c",
            str(self.threads),
            "-Q",
            ",".join(self.queues),
            "-n",
            f"{self.name}@{socket.gethostname()}",
            "--without-gossip",
            "--without-mingle",
        ]


def plan_api(settings: Settings, accounts: Sequence[str] | None = None, *, processes: int = 1) -> list[ProcessPlan]:
    """Worker processes for provider accounts: those named, else all whose key is to be had.

    Raises ConfigurationError for an unknown account, a key that is missing, or when no account is left.
    """
    if accounts:
        for name in accounts:
            api_key(settings.catalog.account(name), folder=settings.home)
        chosen = list(accounts)
    else:
        chosen = [name for name in settings.catalog.accounts if _has_key(settings, name)]
    if not chosen:
        raise ConfigurationError(
            "no account is configured whose key is to be had; add [accounts.NAME] to batchmill.toml"
        )
    queues = tuple(settings.catalog.account(n).queue for n in chosen)
    return [ProcessPlan(name=f"api{i}", queues=queues, slots=settings.slots) for i in range(processes)]


def _has_key(settings: Settings, name: str) -> bool:
    try:
        api_key(settings.catalog.accounts[name], folder=settings.home)
    except ConfigurationError as fault:
        log.warning("account_left_out account=%s reason=%s", name, fault)
        return False
    return True


def plan_gpu(settings: Settings, model: str, devices: str) -> list[ProcessPlan]:
    """One worker process per slot of ``devices``, pinned by its environment, serving one model."""
    entry = settings.catalog.model(model)
    if entry.engine is None:
        raise ConfigurationError(
            f"model {model!r} is served by account {entry.account!r}, not by a device; use `batchmill worker api --accounts {entry.account}`"
        )
    return [
        ProcessPlan(
            name=slot.name if len(settings.catalog.models) == 1 else f"{slot.name}.{model}",
            queues=(entry.queue,),
            slots=settings.gpu_slots,
            environment={**slot.environment(), DEVICE_VARIABLE: slot.engine_device},
        )
        for slot in slots(devices)
    ]


@dataclass(slots=True)
class _Child:
    plan: ProcessPlan
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    backoff_s: float = 0.0
    start_at: float = 0.0
    unfit: str | None = None


class Supervisor:
    """Runs worker processes as children. They watch a pipe to this process and drain when it closes."""

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        *,
        settings: Settings,
        environment: Mapping[str, str],
        log_folder: Path | None = None,
    ) -> None:
        self._children = [_Child(plan=p) for p in plans]
        self._settings = settings
        self._environment = {**os.environ, **environment}
        self._log_folder = log_folder
        self._database: Database | None = None
        self._ends: tuple[int, ...] = os.pipe()  # children hold the first and see the second close
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        """Starts every process and watches them from a thread."""
        self._settle_names()
        for child in self._children:
            self._spawn(child)
        self._thread.start()

    def _settle_names(self) -> None:
        """Gives a process another name where one on this host has it: by another installation, or a second command."""
        try:
            host = socket.gethostname()
            here = self._open_database().run(lambda conn: telemetry.workers_of_host(conn, host), patience_s=2)
        except DatabaseError as fault:
            log.info("names_not_compared error=%s", fault)
            return
        taken, mark = taken_names(here), mark_of(self._settings.home)
        for child in self._children:
            child.plan = replace(child.plan, name=distinct(child.plan.name, taken, mark=mark))
            taken.add(child.plan.name)

    @property
    def unfit(self) -> list[str]:
        """Why processes that could not start are left alone."""
        return [f"{c.plan.name}: {c.unfit}" for c in self._children if c.unfit]

    @property
    def alive(self) -> int:
        return sum(c.process is not None and c.process.poll() is None for c in self._children)

    @property
    def pids(self) -> list[int]:
        return [c.process.pid for c in self._children if c.process is not None and c.process.poll() is None]

    def _spawn(self, child: _Child) -> None:
        environment = {**self._environment, **child.plan.variables(), PARENT_FD_VARIABLE: str(self._ends[0])}
        log_file = None
        if self._log_folder is not None:
            self._log_folder.mkdir(parents=True, exist_ok=True)
            log_file = (self._log_folder / f"{child.plan.name.replace('/', '_')}.log").open("ab")
        try:
            child.process = subprocess.Popen(
                child.plan.command(),
                env=environment,
                cwd=self._settings.home,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(self._ends[0],),
                start_new_session=True,  # Ctrl-C reaches the parent alone, which drains its children
            )
        finally:
            if log_file is not None:
                log_file.close()
        child.started = time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_EVERY_S):
            for child in self._children:
                if child.process is None:
                    if child.unfit is None and time.monotonic() >= child.start_at:
                        self._spawn(child)
                elif child.process.poll() is not None:
                    self._bury(child, child.process)

    def _bury(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        """Frees the chunks of a dead child at once, and decides when it starts again."""
        code, child.process = process.returncode, None
        if code == UNFIT_EXIT_CODE:
            child.unfit = self._reason(process.pid)
            log.error("worker_unfit name=%s reason=%s", child.plan.name, child.unfit)
            return
        if code == RENEW_EXIT_CODE:  # drained, so nothing of it is left to free
            child.backoff_s = child.start_at = 0.0
            log.info("worker_renewed name=%s", child.plan.name)
            return
        ran_s = time.monotonic() - child.started
        child.backoff_s = 0.0 if ran_s > _STEADY_S else min(max(child.backoff_s * 2, _FIRST_BACKOFF_S), _MOST_BACKOFF_S)
        child.start_at = time.monotonic() + child.backoff_s
        log.warning("worker_died name=%s code=%s starts_again_s=%.0f", child.plan.name, code, child.backoff_s)
        self._free(process.pid)

    def _free(self, pid: int) -> None:
        def work(conn: Connection) -> int:
            ids = telemetry.workers_of_process(conn, socket.gethostname(), pid)
            telemetry.bury(conn, ids)
            return reaping.expire_leases(conn, worker_ids=ids)

        try:
            self._open_database().run(work, patience_s=5)
        except DatabaseError as fault:
            log.warning("leases_left_to_expire pid=%d error=%s", pid, fault)

    def _reason(self, pid: int) -> str:
        try:
            unfit = self._open_database().run(telemetry.unfit_workers, patience_s=2)
        except DatabaseError as fault:
            return f"see its log ({fault})"
        mine = [w.reason for w in unfit if w.pid == pid and w.reason]
        return mine[-1] if mine else "see its log"

    def _open_database(self) -> Database:
        if self._database is None:
            self._database = Database(self._settings.database_address, pool_size=1)
        return self._database

    def stop(self, *, grace_s: float | None = None) -> None:
        """Drains every child within ``grace_s`` (default: the drain time and 10 s), then kills. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        living = [c.process for c in self._children if c.process is not None and c.process.poll() is None]
        for process in living:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + (self._settings.drain_s + _KILL_AFTER_S if grace_s is None else grace_s)
        for process in living:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("worker_killed pid=%d it did not drain in time", process.pid)
                process.kill()
                process.wait()
                self._free(process.pid)
        if self._database is not None:
            self._database.close()
        for end in self._ends:
            os.close(end)
        self._ends = ()

    def kill(self) -> None:
        """Ends every child at once. Idempotent."""
        self.stop(grace_s=0.0)
