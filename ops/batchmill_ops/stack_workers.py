"""The worker processes of an embedded stack: which ones a queue needs, started once, and those that could not start."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchmill_core.catalog import Limits
from batchmill_core.errors import BatchmillError, ConfigurationError
from batchmill_core.settings import HOME_VARIABLE, Settings, load_settings
from batchmill_db import reaping, telemetry
from batchmill_db.session import Connection, Database
from batchmill_workers.gpu.devices import usable_cores
from batchmill_workers.launch import ProcessPlan, Supervisor, plan_api, plan_gpu

from .healthy import is_worker
from .stack_folder import tail

log = logging.getLogger(__name__)

_CORES_PER_PROCESS = 2  # one for its event loop, one for its recorder, the broker and the database
_MOST_PROCESSES = 4  # of one account: some 8,000 rows/s
_DEFAULT_IN_FLIGHT = 256
_CPU_ENGINES = frozenset({"openvino"})  # it cannot use NVIDIA's GPUs
_WORKER_SAYS = "batchmill worker: "
_UNSAFE_IN_FILE_NAME = re.compile(r"[^A-Za-z0-9.+-]")


@dataclass(slots=True)
class _Group:
    """The processes of one queue, and the users that asked for it."""

    supervisor: Supervisor | None = None
    refused: str | None = None
    users: set[int] = field(default_factory=set)

    def unfit(self, queue: str, logs: Path) -> list[str]:
        if self.supervisor is None:
            return [f"{queue}: {self.refused}"]
        return [_with_log(reason, logs) for reason in self.supervisor.unfit]

    @property
    def useless(self) -> bool:
        """Whether none of its processes runs or will be started again."""
        return self.supervisor is None or (self.supervisor.alive == 0 and bool(self.supervisor.unfit))


class StackWorkers:
    """Starts workers for queues and ends them. Calls of ``serve`` and ``drain`` must not overlap; others may."""

    def __init__(self, *, home: Path, broker_url: str, logs: Path) -> None:
        self._home = home
        self._broker_url = broker_url
        self._logs = logs
        self._groups: dict[str, _Group] = {}
        self._freed = False

    def serve(self, user: int, queues: Iterable[str]) -> None:
        """Makes sure that each queue has workers. Idempotent; a user's own repeated call never restarts unfit ones.

        The catalogue is read again, for a second user's new models. What cannot be started is told by ``unfit``.
        """
        wanted = [queue for queue in dict.fromkeys(queues) if self._needs_start(user, queue)]
        if not wanted:
            return
        try:
            settings = replace(load_settings(self._home), broker_url=self._broker_url)
        except ConfigurationError as fault:
            self._groups.update({queue: _Group(refused=str(fault), users={user}) for queue in wanted})
            return
        self._free_leases(settings)
        for queue in wanted:
            self._groups[queue] = self._start(settings, queue, user)

    def _needs_start(self, user: int, queue: str) -> bool:
        group = self._groups.get(queue)
        if group is None:
            return True
        known = user in group.users
        group.users.add(user)
        if known or not group.useless:
            return False
        if group.supervisor is not None:
            group.supervisor.kill()
        return True

    def _start(self, settings: Settings, queue: str, user: int) -> _Group:
        try:
            plans = plans_for(settings, queue)
            supervisor = Supervisor(
                plans,
                settings=settings,
                environment={
                    HOME_VARIABLE: str(self._home),
                    "BATCHMILL_BROKER_URL": self._broker_url,
                    "PYTHONSAFEPATH": "1",  # a file celery.py in the user's folder must not be imported in its place
                },
                log_folder=self._logs,
            )
            supervisor.start()
        except (BatchmillError, OSError) as fault:
            log.error("queue_not_served queue=%s error=%s", queue, fault)
            return _Group(refused=str(fault), users={user})
        log.info("queue_served queue=%s processes=%d pids=%s", queue, len(plans), supervisor.pids)
        return _Group(supervisor=supervisor, users={user})

    def _free_leases(self, settings: Settings) -> None:
        if not self._freed:
            database = Database(settings.database_address, pool_size=1)
            try:
                free_leases_of_the_dead(database, socket.gethostname())
                self._freed = True
            except BatchmillError as fault:
                log.warning("leases_left_to_expire error=%s", fault)
            finally:
                database.close()

    @property
    def queues(self) -> list[str]:
        return sorted(self._groups)

    def unfit(self) -> list[str]:
        return [reason for queue, group in sorted(self._groups.items()) for reason in group.unfit(queue, self._logs)]

    def pids(self) -> list[int]:
        return [pid for supervisor in self._supervisors() for pid in supervisor.pids]

    def drain(self, grace_s: float | None) -> None:
        """Ends all processes side by side, each within ``grace_s`` (default: the drain time); a later serve may follow."""
        supervisors = self._supervisors()
        if supervisors:
            with ThreadPoolExecutor(len(supervisors)) as pool:
                list(pool.map(lambda supervisor: supervisor.stop(grace_s=grace_s), supervisors))
        self._groups.clear()

    def kill(self) -> None:
        """Ends all processes at once, also while they drain."""
        for supervisor in self._supervisors():
            supervisor.kill()

    def _supervisors(self) -> list[Supervisor]:
        return [group.supervisor for group in list(self._groups.values()) if group.supervisor is not None]


def _with_log(reason: str, logs: Path) -> str:
    """A process that failed before it could note its reason in the database said it last in its log."""
    name, _, said = reason.partition(": ")
    if not said.startswith("see its log"):
        return reason
    last = (tail(logs / f"{name}.log").splitlines() or [""])[-1].removeprefix(_WORKER_SAYS)
    return f"{name}: {last or said}"


def plans_for(settings: Settings, queue: str) -> list[ProcessPlan]:
    """The processes that serve one queue on this host. Raises ConfigurationError when it cannot be served here."""
    wing, _, name = queue.partition(".")
    if wing == "api":
        plans = plan_api(settings, accounts=[name], processes=api_processes(settings, name, cores=usable_cores()))
    elif wing == "gpu":
        plans = _plan_gpu(settings, name)
    else:
        raise ConfigurationError(f"queue {queue!r} is neither api.ACCOUNT nor gpu.MODEL")
    return [replace(plan, name=_process_name(plan, wing, name)) for plan in plans]


def _process_name(plan: ProcessPlan, wing: str, name: str) -> str:
    """Distinct over all queues of the stack and good as a file name: ``api0-openai``, ``gpu0-smollm2``."""
    slot = plan.name if wing == "api" else plan.name.removesuffix(f".{name}")
    return f"{slot}-{_UNSAFE_IN_FILE_NAME.sub('-', name)}"


def _plan_gpu(settings: Settings, model: str) -> list[ProcessPlan]:
    if settings.catalog.model(model).engine in _CPU_ENGINES:
        return plan_gpu(settings, model, devices="cpu")
    try:
        return plan_gpu(settings, model, devices="all")
    except ConfigurationError as fault:
        log.info("no_gpu model=%s reason=%s", model, fault)
        return plan_gpu(settings, model, devices="cpu")


def api_processes(settings: Settings, account: str, *, cores: int) -> int:
    """How many processes serve an account: one per two cores, or one alone where limits are to be kept.

    Limits are kept within one process, so several would exceed what the user set. A lowered ``max_in_flight`` is such a
    limit; the default is not, since it only bounds memory and the provider's patience.
    """
    entry = settings.catalog.account(account)
    limits = [entry.limits, *(m.limits for m in settings.catalog.models.values() if m.account == account)]
    if entry.max_in_flight < _DEFAULT_IN_FLIGHT or any(_rated(limit) for limit in limits):
        return 1
    return min(_MOST_PROCESSES, max(1, cores // _CORES_PER_PROCESS))


def _rated(limits: Limits) -> bool:
    return limits != Limits()


def free_leases_of_the_dead(database: Database, host: str) -> int:
    """Ends the leases of this host's workers whose processes are gone, so that their rows go on at once. Idempotent."""

    def work(conn: Connection) -> int:
        dead: Sequence[str] = [w.id for w in telemetry.workers_of_host(conn, host) if not is_worker(w.pid)]
        telemetry.bury(conn, dead)
        return reaping.expire_leases(conn, worker_ids=dead)

    freed = database.run(work, patience_s=10)
    if freed:
        log.info("leases_freed chunks=%d", freed)
    return freed
