"""What runs here and what there is to do: the facts behind ``batchmill status``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import redis

from batchmill_core.settings import Settings, redacted_url
from batchmill_db import gauges, jobs
from batchmill_db.gauges import Gauges
from batchmill_db.session import Database, DatabaseError
from batchmill_db.telemetry import WorkerRecord

from .flower_folder import FlowerFolder, Running
from .report import read_situation
from .stack_folder import StackFolder
from .stack_hold import status as stack_status
from .up import standing
from .waits import stopped_because

_CONNECT_S = 3.0
_JOBS_LOOKED_AT = 20  # the newest: a folder may hold thousands
_STOPPED_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStatus:
    """The embedded stack of this folder. ``users`` are the programs that need it, ``batchmill up`` among them."""

    pid: int
    users: int
    broker_pid: int | None
    worker_pids: Sequence[int]
    queues: Sequence[str]
    unfit: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus:
    """One queue: chunks to do and being done, and who serves it."""

    queue: str
    ready: int
    leased: int
    workers: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Everything that ``batchmill status`` shows. ``database_fault``: why jobs, queues and workers are not known.

    ``stopped`` says of the newest jobs that do not go on by themselves why, and what to do.
    """

    home: str
    embedded: bool
    up_pid: int | None
    broker: str | None  # its URL without the password
    broker_answers: bool
    database: str
    database_fault: str | None
    stack: StackStatus | None
    flower: Running | None
    jobs: Mapping[str, int]
    stopped: Sequence[str]
    queues: Sequence[QueueStatus]
    workers: Sequence[WorkerRecord]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        workers = [_worker(w) for w in self.workers]
        return {**{name: _plain(getattr(self, name)) for name in self.__slots__}, "workers": workers}


def read_status(settings: Settings) -> Status:
    """Looks at everything; what is away is said in the answer, not raised."""
    up = standing(settings)
    stack = _stack(settings)
    broker = settings.broker_url or (_embedded_broker(settings) if stack else None)
    now, stopped, fault = _look(settings)
    return Status(
        home=str(settings.home),
        embedded=settings.embedded,
        up_pid=up.pid if up else None,
        broker=redacted_url(broker) if broker else None,
        broker_answers=broker is not None and _answers(broker),
        database=redacted_url(settings.database_address),
        database_fault=fault,
        stack=stack,
        flower=FlowerFolder(path=settings.state_folder).running(),
        jobs=now.job_states if now else {},
        stopped=stopped,
        queues=_queues(now) if now else (),
        workers=now.workers if now else (),
    )


def _stack(settings: Settings) -> StackStatus | None:
    found = stack_status(StackFolder(path=settings.state_folder)) if settings.embedded else None
    if found is None:
        return None
    return StackStatus(
        pid=found["pid"],
        users=found["users"],
        broker_pid=found["valkey_pid"],
        worker_pids=found["worker_pids"],
        queues=found["queues"],
        unfit=found["unfit"],
    )


def _embedded_broker(settings: Settings) -> str | None:
    url = StackFolder(path=settings.state_folder).read_state().get("broker_url")
    return None if url is None else str(url)


def _answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=_CONNECT_S, socket_connect_timeout=_CONNECT_S) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def _look(settings: Settings) -> tuple[Gauges | None, list[str], str | None]:
    if settings.database_url is None and not (settings.state_folder / "batchmill.db").exists():
        return None, [], None  # nothing was ever submitted here
    database = Database(settings.database_address, pool_size=1)
    try:
        return database.read(lambda conn: gauges.read(conn, ended_jobs=0)), _stopped(database), None
    except DatabaseError as fault:
        return None, [], str(fault)
    finally:
        database.close()


def _stopped(database: Database) -> list[str]:
    newest = database.read(lambda conn: jobs.newest(conn, limit=1000))
    not_ended = [job for job in newest if not job.ended][:_JOBS_LOOKED_AT]
    sentences = (stopped_because(read_situation(database, job.id)) for job in not_ended)
    return list(islice(filter(None, sentences), _STOPPED_SHOWN))


def _queues(now: Gauges) -> list[QueueStatus]:
    workers, slots = Counter[str](), Counter[str]()
    for w in now.workers:
        workers.update(w.queues)
        slots.update(dict.fromkeys(w.queues, w.slots))
    found = []
    for name in sorted({*now.queues, *workers}):
        ready, leased = now.queues.get(name, (0, 0))
        found.append(QueueStatus(queue=name, ready=ready, leased=leased, workers=workers[name], slots=slots[name]))
    return found


def _worker(w: WorkerRecord) -> dict[str, Any]:
    shown = ("name", "host", "pid", "wing", "device", "queues", "slots", "state", "in_flight", "throttled", "version")
    return {name: getattr(w, name) for name in shown}


def _plain(value: Any) -> Any:
    if isinstance(value, StackStatus | Running | QueueStatus):
        return asdict(value)
    return [_plain(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
