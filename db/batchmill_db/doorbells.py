"""Which ready chunks are published to their queues, and which of them nobody came for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, literal_column, or_, select, update

from batchmill_core.job import Rows

from .schema import account, chunk, job
from .session import now_ms

# In literals, so that the partial indexes of `schema` serve them.
_READY = chunk.c.state == literal_column("'ready'")
_LEASED = chunk.c.state == literal_column("'leased'")
_OPEN = job.c.state == literal_column("'open'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doorbell:
    """A chunk to tell the broker of, with words for Flower."""

    chunk_id: int
    queue: str
    label: str


def ring(conn: Connection, *, windows: Mapping[str, int], again_after_ms: int) -> list[Doorbell]:
    """Marks the next chunks of each queue as published, as many as its window has room for, and answers them.

    A chunk published ``again_after_ms`` ago and still ready counts as lost and is published again. Commit first,
    publish after: a crash in between costs ``again_after_ms``. Queues of stopped accounts and of jobs that are not open
    are left out.
    """
    bells: list[Doorbell] = []
    jobs = _open_jobs(conn)
    stopped = _stopped_queues(conn)
    for queue, window in windows.items():
        outstanding = conn.execute(
            select(func.count())
            .select_from(chunk.join(job, job.c.id == chunk.c.job_id))
            .where(_READY, chunk.c.queue == queue, chunk.c.published_ms > now_ms() - again_after_ms, _OPEN)
        ).scalar_one()
        if window > outstanding and queue not in stopped:
            bells += _ring_queue(conn, jobs, queue, window - outstanding, again_after_ms)
    return bells


def _ring_queue(
    conn: Connection, jobs: Mapping[int, Any], queue: str, count: int, again_after_ms: int
) -> list[Doorbell]:
    silent = or_(chunk.c.published_ms.is_(None), chunk.c.published_ms <= now_ms() - again_after_ms)
    due = _next(conn, jobs, queue, count, chunk.c.not_before_ms <= now_ms(), silent)
    if not due:
        return []
    marked = set(
        conn.execute(
            update(chunk)
            .where(chunk.c.id.in_([d.id for d in due]), _READY, silent)
            .values(published_ms=now_ms())
            .returning(chunk.c.id)
        ).scalars()
    )
    return [
        Doorbell(chunk_id=d.id, queue=queue, label=label(jobs[d.job_id].name, Rows.parse(d.rows), jobs[d.job_id].model))
        for d in due
        if d.id in marked
    ]


def _open_jobs(conn: Connection) -> dict[int, Any]:
    return {r.id: r for r in conn.execute(select(job.c.id, job.c.name, job.c.model).where(_OPEN))}


def _stopped_queues(conn: Connection) -> set[str]:
    return {f"api.{n}" for n in conn.execute(select(account.c.name).where(account.c.state == "stopped")).scalars()}


def _next(
    conn: Connection, job_ids: Iterable[int], queue: str, count: int, *conditions: ColumnElement[bool]
) -> list[Any]:
    """The first ready chunks of a queue, by priority and age.

    Asked job by job, so that an index gives them in order, and chunks of jobs that are not open are never touched.
    """
    found: list[Any] = []
    for job_id in job_ids:
        found += conn.execute(
            select(chunk.c.id, chunk.c.job_id, chunk.c.rows, chunk.c.priority)
            .where(_READY, chunk.c.job_id == job_id, chunk.c.queue == queue, *conditions)
            .order_by(chunk.c.priority, chunk.c.id)
            .limit(count)
        ).all()
    return sorted(found, key=lambda r: (r.priority, r.id))[:count]


def label(job_name: str, rows: Rows, model: str) -> str:
    """What Flower shows as the arguments of a task: ``reviews · rows 400-499 · smollm2``."""
    where = str(rows) if len(rows.ranges) <= 3 else f"{len(rows)} of {rows.first}-{rows.last}"
    return f"{job_name} · rows {where} · {model}"


def queues_with_work(conn: Connection) -> dict[str, tuple[int, int]]:
    """Ready and leased chunks per queue of jobs that are open: {queue: (ready, leased)}."""
    jobs = _open_jobs(conn)
    found: dict[str, list[int]] = {}
    for place, state in enumerate((_READY, _LEASED)):
        # By job, though nobody asks for it, because so it is read off the index in one go.
        counted = select(chunk.c.job_id, chunk.c.queue, func.count()).where(state)
        for job_id, queue, n in conn.execute(counted.group_by(chunk.c.job_id, chunk.c.queue)):
            if job_id in jobs:
                found.setdefault(queue, [0, 0])[place] += n
    return {queue: (ready, leased) for queue, (ready, leased) in found.items()}


def overdue(conn: Connection, queues: Sequence[str], *, waited_ms: int, limit: int = 8) -> list[int]:
    """Ready chunks of these queues that were due ``waited_ms`` ago and that nobody took. Reads only."""
    jobs, stopped = _open_jobs(conn), _stopped_queues(conn)
    before = now_ms() - waited_ms
    found: list[Any] = []
    for queue in set(queues) - stopped:
        found += _next(conn, jobs, queue, limit, chunk.c.not_before_ms <= before, chunk.c.created_ms <= before)
    return [r.id for r in sorted(found, key=lambda r: (r.priority, r.id))[:limit]]
