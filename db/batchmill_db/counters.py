"""A job's counters, added up from those of its chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    bindparam,
    case,
    null,
    select,
    update,
)

from .bulk import Bulk
from .schema import COUNTER_COLUMNS, chunk, job


def sum_counters(conn: Connection, job_ids: Sequence[int] | None = None) -> None:
    """Adds what chunks counted since the last time to their jobs, whatever state these are in. Idempotent.

    Touches only chunks whose counters moved: at 100,000 chunks a sum over all takes a good part of each second. A chunk
    that is being saved at the moment is left for the next time.
    """
    moved = select(
        chunk.c.id, chunk.c.job_id, chunk.c.summed, chunk.c.first_claim_ms, chunk.c.last_save_ms, *_COUNTERS
    ).where(chunk.c.unsummed_since_ms > 0)
    if job_ids is not None:
        moved = moved.where(chunk.c.job_id.in_(job_ids))
    chunks = conn.execute(moved.with_for_update(skip_locked=True)).all()
    by_job: dict[int, list[Any]] = {}
    for c in chunks:
        by_job.setdefault(c.job_id, []).append(c)
    _SUMMED.run(conn, [(json.dumps(_counted(c)), c.id) for c in chunks])
    for job_id, its in sorted(by_job.items()):
        _add_to_job(conn, job_id, its)


_COUNTERS = [chunk.c[c] for c in COUNTER_COLUMNS]
_SUMMED = Bulk(
    ("b_summed", "b_chunk"),
    lambda _: (
        update(chunk)
        .where(chunk.c.id == bindparam("b_chunk"))
        .values(summed=bindparam("b_summed"), unsummed_since_ms=null())
    ),
)


def _counted(c: Any) -> dict[str, int]:
    return {name: n for name in COUNTER_COLUMNS if (n := getattr(c, name))}


def _add_to_job(conn: Connection, job_id: int, chunks: Sequence[Any]) -> None:
    gains = dict.fromkeys(COUNTER_COLUMNS, 0)
    for c in chunks:
        for name, n in _counted(c).items():
            gains[name] += n
        for name, n in json.loads(c.summed or "{}").items():
            gains[name] -= n
    values: dict[str, Any] = {name: job.c[name] + n for name, n in gains.items() if n}
    claims = [c.first_claim_ms for c in chunks if c.first_claim_ms is not None]
    saves = [c.last_save_ms for c in chunks if c.last_save_ms is not None]
    if claims:
        values["first_claim_ms"] = case((job.c.first_claim_ms <= min(claims), job.c.first_claim_ms), else_=min(claims))
    if saves:
        values["last_save_ms"] = case((job.c.last_save_ms >= max(saves), job.c.last_save_ms), else_=max(saves))
    if values:
        conn.execute(update(job).where(job.c.id == job_id).values(**values))
