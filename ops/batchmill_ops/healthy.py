"""Whether what runs in this container makes progress: `python -m batchmill_ops.healthy worker` (or `flower`).

For health checks: exit code 0 or 1, and one sentence. A worker is asked for by the beats that it saves in SQL, not by a
ping: those stop when its event loop stands still, and they tell nothing but the truth about a process that is frozen.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import requests

from batchmill_core.errors import BatchmillError
from batchmill_core.settings import Settings, load_settings
from batchmill_db import telemetry
from batchmill_db.session import Database, DatabaseError
from batchmill_db.telemetry import WorkerRecord

_PATIENCE_S = 5.0
_COMMAND = b"batchmill_workers.tasks"  # what `launch` starts
_FLOWER = "http://127.0.0.1:5555/healthcheck"  # as docker-compose.yml starts it


def faults(workers: Sequence[WorkerRecord], running: Collection[int], *, patience_ms: float) -> list[str]:
    """What is wrong with the workers of one host, of which the processes ``running`` run.

    A worker that is gone, and whose process is too, is history: its supervisor has started another.
    """
    latest: dict[int, WorkerRecord] = {}  # a process id comes again after a restart
    for w in sorted(workers, key=lambda w: w.age_ms, reverse=True):
        latest[w.pid] = w
    present = [w for w in latest.values() if w.pid in running]
    silent = [f"{w.name} gave no beat for {w.age_ms / 1000:.0f} s" for w in present if w.age_ms > patience_ms]
    return silent if present else ["no worker process runs here"]


def look_at_workers(settings: Settings) -> list[str]:
    """What is wrong with the workers of this host.

    Nothing is, as far as one can tell, while the database is away: workers wait for it with answers that were paid
    for, and whoever ended them for that would lose those.
    """
    host = socket.gethostname()
    try:
        database = Database(settings.database_address, pool_size=1)
        try:
            workers = database.run(lambda conn: telemetry.workers_of_host(conn, host), patience_s=_PATIENCE_S)
        finally:
            database.close()
    except DatabaseError as fault:
        sys.stdout.write(f"cannot tell: {fault}\n")
        return []
    running = {w.pid for w in workers if is_worker(w.pid)}
    return faults(workers, running, patience_ms=settings.lease_s * 1000)


def look_at_flower(settings: Settings) -> list[str]:
    """What is wrong with the Flower of this container."""
    from .flower_login import login_for

    login = login_for(settings)
    try:
        answer = requests.get(_FLOWER, auth=(login.user, login.password), timeout=_PATIENCE_S)
    except requests.RequestException as fault:
        return [f"Flower does not answer ({type(fault).__name__})"]
    return [] if answer.ok else [f"Flower answers {answer.status_code}"]


def is_worker(pid: int) -> bool:
    """Whether a Celery worker of ours runs as this process.

    In a container that was started again, a dead worker's number may be that of any other process, or of a thread.
    """
    folder = Path("/proc") / str(pid)
    try:
        status, command = (folder / "status").read_text(), (folder / "cmdline").read_bytes()
    except OSError:
        return False
    return f"\nTgid:\t{pid}\n" in status and _COMMAND in command


LOOKS: dict[str, Callable[[Settings], list[str]]] = {"worker": look_at_workers, "flower": look_at_flower}


def main(arguments: Sequence[str]) -> int:
    """Answers the exit code. Docker keeps what is printed with the container's state."""
    if len(arguments) != 1 or arguments[0] not in LOOKS:
        sys.stderr.write(f"usage: python -m batchmill_ops.healthy {'|'.join(LOOKS)}\n")
        return 2
    try:
        found = LOOKS[arguments[0]](load_settings())
    except BatchmillError as fault:
        found = [str(fault)]
    sys.stdout.write("; ".join(found or ["healthy"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
