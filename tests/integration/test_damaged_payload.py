"""Rows that the database lost to its disk fail by name; all others of the job are answered."""

from __future__ import annotations

from sqlalchemy import select, update

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db.schema import payload
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill

ROWS = 30


def _damage(mill: Mill, job_id: int, first_row: int) -> int:
    """Cuts the payload that begins with this row in half; answers how many rows it has."""
    here = (payload.c.job_id == job_id) & (payload.c.first_row == first_row)
    with mill.database.reading() as conn:
        n_rows, frame = conn.execute(select(payload.c.n_rows, payload.c.requests).where(here)).one()
    mill.database.run(lambda conn: conn.execute(update(payload).where(here).values(requests=frame[: len(frame) // 2])))
    return int(n_rows)


def test_rows_of_a_damaged_payload_fail_with_the_reason_and_the_job_is_done(make_mill: MakeMill) -> None:
    mill = make_mill()
    job = mill.submit(ROWS, chunk_size=10, ring=False)
    lost = _damage(mill, job.id, 10)
    worker = mill.start_worker()

    done = mill.wait_state(job, JobState.DONE)

    by_row = {r.row: r for r in mill.results(job)}
    assert [n for n in range(ROWS) if by_row[n].status == RowStatus.FAILED] == list(range(10, 10 + lost))
    assert by_row[10].error_kind == "damaged_payload"
    assert "check the database's disk" in by_row[10].error
    assert done.by_status[RowStatus.OK] == ROWS - lost
    assert worker.alive
    mill.invariants(job)
