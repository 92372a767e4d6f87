"""How long calls on devices took lately, read from the ledger at a bounded price."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, select

from .schema import call, chunk, job
from .session import now_ms

MOST_JOBS = 20
MOST_CHUNKS = 200
MOST_CALLS = 5000
_SLACK_MS = 5000  # a job's last_save_ms is brought up to date each second or so


def recent(conn: Connection, *, ago_ms: int) -> dict[tuple[str, str], list[int]]:
    """Milliseconds of calls that were settled within ``ago_ms``, by (worker, model), for queues of devices. Reads only.

    The ledger has no index on time, so the way goes by the jobs, then the chunks, in which rows were saved lately: of
    each the newest `MOST_JOBS` and `MOST_CHUNKS`, and `MOST_CALLS` calls in all. With more it is a sample of the newest.
    """
    since_ms: int = conn.execute(select(now_ms() - ago_ms)).scalar_one()
    calls = (
        select(call.c.worker, call.c.model, call.c.latency_ms)
        .where(
            call.c.chunk_id.in_(_chunks(conn, since_ms)), call.c.settled_ms >= since_ms, call.c.latency_ms.is_not(None)
        )
        .order_by(call.c.chunk_id.desc())
        .limit(MOST_CALLS)
    )
    found: dict[tuple[str, str], list[int]] = {}
    for worker, model, latency_ms in conn.execute(calls):
        found.setdefault((worker, model), []).append(latency_ms)
    return found


def _chunks(conn: Connection, since_ms: int) -> Sequence[int]:
    jobs = (
        select(job.c.id)
        .where(job.c.last_save_ms >= since_ms - _SLACK_MS)
        .order_by(job.c.last_save_ms.desc())
        .limit(MOST_JOBS)
    )
    lately = (
        select(chunk.c.id)
        .where(
            chunk.c.job_id.in_(jobs.scalar_subquery()),
            chunk.c.last_save_ms >= since_ms,
            chunk.c.queue.like("gpu.%"),
        )
        .order_by(chunk.c.last_save_ms.desc())
        .limit(MOST_CHUNKS)
    )
    return list(conn.execute(lately).scalars())
