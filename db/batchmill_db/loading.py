"""Statements about a job whose data set is being read: who reads it, opening it early, and what becomes of a dead loader.

A loader gives beats under the job's number in the table of leaders. Whether a job is open and whether it is read to its
end are two facts: an eager one is open while it is not ``loaded``, and is not done before it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, or_, select, update

from batchmill_core.job import JobState

from . import jobs, steering
from .bulk import insert_for
from .schema import chunk, job, leader, payload, round_
from .session import now_ms

LOADER_TTL_MS = 30_000  # a loader that is silent for as long is taken for dead
FORGOTTEN_MS = 600_000  # so long after that its job, if no key goes on with it, is dropped
_PREFIX = "loader:"
_NOBODY = ""
_SOURCE = "source"  # why a job is paused whose data set could not be read on
_DIED = "the process that read its data set ended before the end of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a job stands that is being read."""

    state: JobState
    loaded: bool
    reason_kind: str | None

    @property
    def takes_rows(self) -> bool:
        """Whether more rows may be added: a paused job takes them too, so that nothing has to be read again."""
        return not self.loaded and self.state in (JobState.LOADING, JobState.OPEN, JobState.PAUSED)


def lock(conn: Connection, job_id: int) -> Reading | None:
    """How the job stands, which nobody changes before this transaction ends; None when there is no such job."""
    wanted = select(job.c.state, job.c.loaded, job.c.reason_kind).where(job.c.id == job_id)
    found = conn.execute(wanted.with_for_update(key_share=True)).one_or_none()
    if found is None:
        return None
    return Reading(state=JobState(found.state), loaded=bool(found.loaded), reason_kind=found.reason_kind)


def saved_from(conn: Connection, job_id: int, first_row: int) -> list[tuple[int, int, str]]:
    """(first row, rows, digest) of the payloads from this row on, in row order. Reads only."""
    found = conn.execute(
        select(payload.c.first_row, payload.c.n_rows, payload.c.digest)
        .where(payload.c.job_id == job_id, payload.c.first_row >= first_row)
        .order_by(payload.c.first_row)
    )
    return [(r.first_row, r.n_rows, r.digest) for r in found]


def beat(conn: Connection, job_id: int, holder: str, *, ttl_ms: int = LOADER_TTL_MS) -> None:
    """A loader says that it lives. Idempotent. A job that was paused because it seemed dead is open again."""
    insert_ = insert_for(conn.dialect.name)
    times = {"holder": holder, "until_ms": now_ms() + ttl_ms, "tick_ms": now_ms()}
    statement = insert_(leader).values(name=_name(job_id), **times)
    conn.execute(statement.on_conflict_do_update(index_elements=[leader.c.name], set_=times))
    _reopen(conn, job_id, job.c.reason == _DIED)


def leave(conn: Connection, job_id: int) -> None:
    """The loader ends; the job is read by nobody until somebody goes on with it. Idempotent."""
    conn.execute(delete(leader).where(leader.c.name == _name(job_id)))


def give_up(conn: Connection, job_id: int) -> None:
    """The loader ends and has told its user why, but could not drop the job: the next `sweep` may. Idempotent."""
    conn.execute(update(leader).where(leader.c.name == _name(job_id)).values(holder=_NOBODY, until_ms=0))


def is_read(conn: Connection, job_id: int) -> bool:
    """Whether a loader lives that reads this job. Reads only."""
    alive = select(leader.c.name).where(leader.c.name == _name(job_id), leader.c.until_ms >= now_ms())
    return conn.execute(alive).first() is not None


def set_key(conn: Connection, job_id: int) -> None:
    """A job without a key gets its own id as one, so that a source which fails can be gone on with. Idempotent."""
    conn.execute(update(job).where(job.c.id == job_id, job.c.key.is_(None)).values(key=job.c.public_id))


def go_on(conn: Connection, job_id: int, new: jobs.NewJob) -> None:
    """The same key goes on reading a job that workers know already: only its budget may change. Idempotent."""
    conn.execute(update(job).where(job.c.id == job_id).values(submission=json.dumps(dict(new.submission))))
    if new.budget_nanousd is not None:
        steering.set_budget(conn, job_id, new.budget_nanousd)


def open_early(conn: Connection, job_id: int) -> bool:
    """`loading` to `open` before the data set is read to its end, or `paused` for its source to `open`. Idempotent.

    Answers whether this call did it. A job that is paused for another reason stays so.
    """
    opened = conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.LOADING)
        .values(state=JobState.OPEN, opened_ms=now_ms())
    )
    return opened.rowcount == 1 or _reopen(conn, job_id, job.c.reason_kind == _SOURCE)


def _reopen(conn: Connection, job_id: int, why: Any) -> bool:
    """A job that is not read yet and paused for this reason is open again, its chunks publishable at once."""
    done = conn.execute(
        update(job)
        .where(job.c.id == job_id, job.c.state == JobState.PAUSED, job.c.loaded.is_(False), why)
        .values(state=JobState.OPEN, reason=None, reason_kind=None)
    )
    if done.rowcount:
        steering.make_publishable(conn, job_id)
    return bool(done.rowcount)


def note(
    conn: Connection,
    job_id: int,
    *,
    n_rows: int,
    n_skipped: int,
    skipped: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
) -> None:
    """Notes how far a loader has come; one that is behind another of the same job changes nothing. Idempotent."""
    at: int = conn.execute(select(job.c.n_rows).where(job.c.id == job_id)).scalar_one()
    if n_rows >= at:
        jobs.set_progress(conn, job_id, n_rows=n_rows, n_skipped=n_skipped, skipped=skipped, columns=columns)


def end(conn: Connection, job_id: int) -> None:
    """Every row is saved: a job that was `loading` is `open`, one that was open may now become done. Idempotent."""
    if not jobs.mark_loaded(conn, job_id):
        _reopen(conn, job_id, job.c.reason_kind == _SOURCE)  # its source is read after all
        conn.execute(update(job).where(job.c.id == job_id).values(loaded=True))
    leave(conn, job_id)


def stop(conn: Connection, job_id: int, reason: str) -> bool:
    """The source of an open job failed: it is `paused` with the reason until the same key goes on. Idempotent.

    Answers whether this call paused it; the reason of one that is paused already stays, and one that another loader has
    read to its end needs no source any more.
    """
    leave(conn, job_id)
    now = lock(conn, job_id)
    return now is not None and not now.loaded and steering.pause(conn, job_id, kind=_SOURCE, reason=reason)


def drop(conn: Connection, job_id: int) -> bool:
    """Forgets a job that is still `loading`: it is refused as a whole, and nothing was asked. Idempotent."""
    now = lock(conn, job_id)
    if now is None or now.state is not JobState.LOADING:
        return False
    leave(conn, job_id)
    for table in (payload, chunk, round_):
        conn.execute(delete(table).where(table.c.job_id == job_id))
    conn.execute(delete(job).where(job.c.id == job_id))
    return True


def sweep(conn: Connection) -> list[int]:
    """Open jobs whose loader died are paused with that reason; answers them. Idempotent.

    A loading one stays for its key. Without a key it can never be gone on with: it is failed, its rows dropped, once its
    loader has been silent for `FORGOTTEN_MS`; one that was given up is gone.
    """
    waits = select(job.c.id).where(job.c.state == JobState.OPEN, job.c.loaded.is_(False))
    unread = list(conn.execute(waits).scalars())
    paused = [i for i in unread if not is_read(conn, i) and stop(conn, i, _DIED)]
    silent = select(leader.c.name, leader.c.holder).where(
        leader.c.name.startswith(_PREFIX), leader.c.until_ms < now_ms() - FORGOTTEN_MS
    )
    for name, holder in list(conn.execute(silent)):
        _forget(conn, int(name.removeprefix(_PREFIX)), is_told=holder == _NOBODY)
    return paused


def _forget(conn: Connection, job_id: int, *, is_told: bool) -> None:
    without_key = select(job.c.id).where(job.c.id == job_id, or_(job.c.key.is_(None), job.c.key == job.c.public_id))
    if conn.execute(without_key).first() is not None:
        if is_told:
            drop(conn, job_id)
        else:
            jobs.fail_loading(conn, job_id, _DIED)
    leave(conn, job_id)


def _name(job_id: int) -> str:
    return f"{_PREFIX}{job_id}"
