"""Processes that race for the same rows of a database."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

from batchmill_db import jobs, migrate, telemetry
from batchmill_db.session import Connection, Database
from tests.conformance.db.world import World, settled

_TIMEOUT_S = 60
# Forked from a process that has everything imported, and no threads or connections.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


def race(run: Callable[..., Any], url: str, n: int, *arguments: object) -> list[Any]:
    """Starts ``n`` processes, lets them go at the same moment, and answers what ``run`` returned in each."""
    start = _processes.Barrier(n)
    racers = []
    for i in range(n):
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=_race, args=(run, url, i, start, theirs, arguments))
        process.start()
        racers.append((process, ours))
    answers = [_answer(pipe) for _, pipe in racers]
    for process, pipe in racers:
        process.join(_TIMEOUT_S)
        pipe.close()
        process.close()
    return answers


def _answer(pipe: Pipe) -> Any:
    assert pipe.poll(_TIMEOUT_S), "a racer does not answer"
    return pipe.recv()


def _race(run: Callable[..., Any], url: str, i: int, start: Any, pipe: Pipe, arguments: Sequence[Any]) -> None:
    database = Database(url)
    start.wait(_TIMEOUT_S)
    pipe.send(run(database, f"racer{i}", *arguments))
    database.close()


def upgrade(database: Database, _: str) -> str | None:
    return migrate.upgrade(database)


def claim_all(database: Database, name: str, ids: Sequence[int]) -> list[int]:
    """Tries to claim every chunk."""
    world = World(database)
    return [i for i in ids if world.claim(i, name)]


def spend(database: Database, name: str, ids: Sequence[int]) -> dict[str, int]:
    """Claims its own chunk, reserves call by call until the budget refuses, and settles every other one."""
    world = World(database)
    claim = world.claim(ids[int(name.removeprefix("racer"))], name)
    assert claim is not None
    accepted, over = 0, 0
    for seq in range(1, 400):
        if not world.reserve(claim, [seq], rows=[claim.rows]).accepted:
            break
        accepted += 1
        job = database.run(lambda conn: jobs.get(conn, claim.job_id))
        over += job.held_nanousd > (job.budget_nanousd or 0)
        if seq % 2:
            world.save(claim, seq, (), [settled(seq)])
    return {"accepted": accepted, "over": over}


def lead_a_lot(database: Database, name: str) -> list[int]:
    """Asks for the lead again and again; answers the times at which it had it by the database's clock."""
    held = []

    def ask(conn: Connection) -> int | None:
        if not telemetry.lead(conn, "race", name, ttl_ms=5).leads:
            return None
        return int(conn.exec_driver_sql("SELECT until_ms FROM leader WHERE name = 'race'").scalar_one())

    for _ in range(150):
        until = database.run(ask)
        if until is not None:
            held.append(until)
    return held
