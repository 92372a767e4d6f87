"""Invariants of rows: none is lost, none is doubled, each result has its payload and its attempt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Select, and_, func, literal_column, not_, or_, select

from batchmill_core.job import ChunkState, JobState, Rows
from batchmill_core.request import STATUSES, RowStatus

from .jobs import JobRecord
from .schema import chunk, payload, result

MOST_CASES = 100
_LIVE = (ChunkState.READY, ChunkState.LEASED)
_HOLDS_ROWS = (*_LIVE, ChunkState.DEAD)


def cases(conn: Connection, statement: Select[Any]) -> list[str]:
    """The rows that a statement finds, as ``name=value`` text; a hundred at most."""
    found = conn.execute(statement.limit(MOST_CASES))
    return [" ".join(f"{k}={v}" for k, v in r._mapping.items()) for r in found]


def every_row_has_one_final_status(conn: Connection, job: JobRecord) -> list[str]:
    """Each row has a result, or is dead, or is in a chunk that is ready or leased while the job runs."""
    if not job.loaded or job.state not in (JobState.OPEN, JobState.PAUSED, JobState.DONE):
        return []
    after = func.coalesce(func.lead(result.c.row).over(order_by=result.c.row), job.n_rows)
    numbered = select(result.c.row, after.label("next")).where(result.c.job_id == job.id).subquery()
    gaps = select(numbered.c.row + 1, numbered.c.next - 1).where(numbered.c.next > numbered.c.row + 1)
    first = conn.execute(select(func.min(result.c.row)).where(result.c.job_id == job.id)).scalar_one()
    missing = [(0, (job.n_rows if first is None else first) - 1), *((a, b) for a, b in conn.execute(gaps))]
    accounted = Rows.of(n for c in _row_chunks(conn, job) for n in Rows.parse(c.rows))
    return [f"row={n}" for n in _outside(missing, accounted)]


def _outside(ranges: list[tuple[int, int]], accounted: Rows) -> Iterator[int]:
    known, found = set(accounted), 0
    for first, last in ranges:
        for n in range(first, last + 1):
            if n not in known:
                yield n
                found += 1
                if found == MOST_CASES:
                    return


def _row_chunks(conn: Connection, job: JobRecord) -> list[Any]:
    """Chunks whose rows wait, run or are dead."""
    wanted = select(chunk.c.id, chunk.c.rows, chunk.c.first_row, chunk.c.n_rows, chunk.c.round, chunk.c.state)
    return list(conn.execute(wanted.where(chunk.c.job_id == job.id, chunk.c.state.in_(_HOLDS_ROWS))))


def no_result_is_beyond_the_last_row(conn: Connection, job: JobRecord) -> list[str]:
    """Results are of rows from 0 to the job's last."""
    beyond = or_(result.c.row < 0, result.c.row >= job.n_rows)
    return cases(conn, select(result.c.row).where(result.c.job_id == job.id, beyond))


def every_result_has_its_payload(conn: Connection, job: JobRecord) -> list[str]:
    """The row of each result is in a payload."""
    covers = and_(
        payload.c.job_id == result.c.job_id,
        payload.c.first_row <= result.c.row,
        payload.c.first_row + payload.c.n_rows > result.c.row,
    )
    held = select(payload.c.first_row).where(covers).exists()
    return cases(conn, select(result.c.row).where(result.c.job_id == job.id, ~held))


def payloads_follow_each_other(conn: Connection, job: JobRecord) -> list[str]:
    """Each payload begins where the one before it ends, the first at row 0."""
    ends = payload.c.first_row + payload.c.n_rows
    before = func.coalesce(func.lag(ends).over(order_by=payload.c.first_row), 0)
    ordered = select(payload.c.first_row, before.label("expected")).where(payload.c.job_id == job.id).subquery()
    return cases(conn, select(ordered).where(ordered.c.first_row != ordered.c.expected))


def payloads_hold_every_row(conn: Connection, job: JobRecord) -> list[str]:
    """The payloads of a loaded job hold as many rows as the job has."""
    if not job.loaded:
        return []
    held = func.coalesce(func.sum(payload.c.n_rows), 0)
    counted = select(held.label("held"), literal_column(str(job.n_rows)).label("rows"))
    return cases(conn, counted.where(payload.c.job_id == job.id).having(held != job.n_rows))


def an_ended_job_has_no_work_left(conn: Connection, job: JobRecord) -> list[str]:
    """No chunk of a job that is done is ready or leased, none of a cancelled or failed one is ready."""
    left = {JobState.DONE: _LIVE, JobState.CANCELLED: (ChunkState.READY,), JobState.FAILED: _LIVE}.get(job.state)
    if left is None:
        return []
    found = select(chunk.c.id.label("chunk"), chunk.c.state).where(chunk.c.job_id == job.id, chunk.c.state.in_(left))
    return cases(conn, found)


def no_row_is_in_two_chunks(conn: Connection, job: JobRecord) -> list[str]:
    """No row of one round is in two chunks that are ready or leased."""
    owners: dict[tuple[int, int], int] = {}
    twice = []
    for c in _row_chunks(conn, job):
        for n in Rows.parse(c.rows) if c.state in _LIVE else ():
            other = owners.setdefault((c.round, n), c.id)
            if other != c.id:
                twice.append(f"row={n} chunks={other},{c.id}")
    return twice[:MOST_CASES]


def chunks_describe_their_rows(conn: Connection, job: JobRecord) -> list[str]:
    """The first row and the number of rows of a chunk are those of its list, within the job."""
    wrong = []
    for c in _row_chunks(conn, job):
        rows = Rows.parse(c.rows)
        if not rows or (rows.first, len(rows)) != (c.first_row, c.n_rows) or (job.loaded and rows.last >= job.n_rows):
            wrong.append(f"chunk={c.id} rows={c.rows} first_row={c.first_row} n_rows={c.n_rows}")
    return wrong[:MOST_CASES]


def leases_are_of_leased_chunks(conn: Connection, job: JobRecord) -> list[str]:
    """A chunk that is leased has an owner and an end of its lease; no other has."""
    leased = chunk.c.state == ChunkState.LEASED
    whole = and_(chunk.c.lease_owner.is_not(None), chunk.c.lease_until_ms.is_not(None))
    none = and_(chunk.c.lease_owner.is_(None), chunk.c.lease_until_ms.is_(None))
    wrong = or_(and_(leased, not_(whole)), and_(not_(leased), not_(none)))
    found = select(chunk.c.id.label("chunk"), chunk.c.state, chunk.c.lease_owner, chunk.c.lease_until_ms)
    return cases(conn, found.where(chunk.c.job_id == job.id, wrong))


def every_result_has_its_attempt(conn: Connection, job: JobRecord) -> list[str]:
    """Each result names a chunk of its job, a fence that the chunk reached, and a round that the job reached."""
    attempt = select(chunk.c.id).where(
        chunk.c.id == result.c.chunk_id,
        chunk.c.job_id == result.c.job_id,
        chunk.c.fence >= result.c.fence,
        chunk.c.round == result.c.round,
    )
    lost = or_(~attempt.exists(), result.c.round > job.round, result.c.round < 1)
    found = select(result.c.row, result.c.chunk_id, result.c.fence, result.c.round)
    return cases(conn, found.where(result.c.job_id == job.id, lost))


def no_chunk_is_of_a_later_round(conn: Connection, job: JobRecord) -> list[str]:
    """Chunks are of rounds that the job has opened."""
    found = select(chunk.c.id.label("chunk"), chunk.c.round).where(chunk.c.job_id == job.id)
    return cases(conn, found.where(or_(chunk.c.round > job.round, chunk.c.round < 1)))


def results_are_answers(conn: Connection, job: JobRecord) -> list[str]:
    """A result has a known status; dead and cancelled rows have none."""
    known = [s.value for s in STATUSES if s not in (RowStatus.DEAD, RowStatus.CANCELLED)]
    found = select(result.c.row, result.c.status)
    return cases(conn, found.where(result.c.job_id == job.id, result.c.status.not_in(known)))


def embeddings_are_whole(conn: Connection, job: JobRecord) -> list[str]:
    """An embedding is a list of float32, four bytes each."""
    size = func.length(result.c.embedding)
    found = select(result.c.row, size.label("bytes"))
    return cases(conn, found.where(result.c.job_id == job.id, or_(size % 4 != 0, size == 0)))


INVARIANTS = (
    every_row_has_one_final_status,
    no_result_is_beyond_the_last_row,
    every_result_has_its_payload,
    payloads_follow_each_other,
    payloads_hold_every_row,
    an_ended_job_has_no_work_left,
    no_row_is_in_two_chunks,
    chunks_describe_their_rows,
    leases_are_of_leased_chunks,
    every_result_has_its_attempt,
    no_chunk_is_of_a_later_round,
    results_are_answers,
    embeddings_are_whole,
)
