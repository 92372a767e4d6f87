"""Jobs as they stand after workers did their part, made by the same statements and without any worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from batchmill_core.errors import CallState
from batchmill_core.request import RowStatus
from batchmill_core.settings import Settings, load_settings
from batchmill_core.usage import Usage
from batchmill_db import booking, chunks, counters, doorbells, jobs, migrate, results, steering
from batchmill_db.booking import NewCall
from batchmill_db.chunks import Claim
from batchmill_db.jobs import JobRecord
from batchmill_db.ledger import CallEnd
from batchmill_db.results import NewResult, Save
from batchmill_db.session import Connection, Database
from batchmill_producers.submit import Submission, submit

CATALOGUE = """
[accounts.sim]
base_url = "http://127.0.0.1:1/v1"

[models.sim-chat]
account = "sim"
price = { input = 0.40, output = 1.60 }

[models.unpriced]
account = "sim"
price = { input = 0, output = 0 }
"""
COST_NANOUSD = 7_000


class PreparedFolder:
    """A folder with a catalogue and an embedded database, to submit to and to answer in."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        (folder / "batchmill.toml").write_text(CATALOGUE)
        (folder / "data.jsonl").write_text('{"text": "good"}\n{"text": "bad"}\n{"text": "ok"}\n{"text": "fine"}\n')
        self.settings: Settings = load_settings(folder, {})
        self.settings.state_folder.mkdir()
        self.database = Database(self.settings.database_address)
        migrate.upgrade(self.database)

    def submit(self, *, name: str = "reviews", budget_nanousd: int | None = None) -> JobRecord:
        """A job of four rows in one chunk, open."""
        submission = Submission(
            dataset=self.path / "data.jsonl",
            model="sim-chat",
            prompt="Label: {{ text }}",
            params={"max_tokens": 8},
            name=name,
            budget_nanousd=budget_nanousd,
        )
        return submit(self.database, self.settings, submission)

    def answer(self, job: JobRecord, statuses: Sequence[RowStatus], *, closed: bool = True) -> None:
        """One call and one result for each row of the job's first chunk; the job is done when all have one.

        Not ``closed``: the worker died after the last row, before it closed the job.
        """

        def work(conn: Connection) -> None:
            bells = doorbells.ring(conn, windows={"api.sim": 8}, again_after_ms=1000)
            for bell in bells:
                claim = chunks.claim(conn, bell.chunk_id, "worker", lease_ms=60_000)
                if claim is not None and claim.job_id == job.id:
                    _answer(conn, claim, statuses)
            counters.sum_counters(conn)
            if closed:
                steering.finish(conn)

        self.database.run(work)

    def done(self, statuses: Sequence[RowStatus] = (RowStatus.OK,) * 4, *, name: str = "reviews") -> JobRecord:
        """A job whose four rows ended with these statuses."""
        job = self.submit(name=name)
        self.answer(job, statuses)
        return self.read(job)

    def read(self, job: JobRecord) -> JobRecord:
        with self.database.reading() as conn:
            return jobs.get(conn, job.id)


def _answer(conn: Connection, claim: Claim, statuses: Sequence[RowStatus]) -> None:
    calls = [
        NewCall(
            chunk_id=claim.chunk_id,
            fence=claim.fence,
            seq=i,
            job_id=claim.job_id,
            round=claim.round,
            rows=type(claim.rows).span(row, 1),
            model="sim-chat",
            worker="worker",
            account="sim",
            bound_nanousd=COST_NANOUSD,
        )
        for i, row in enumerate(claim.rows)
    ]
    booking.reserve(conn, calls, budgeted=claim.budgeted)
    usage = Usage(input=10, output=2)
    ends = [
        CallEnd(seq=c.seq, state=CallState.SETTLED, usage=usage, cost_nanousd=COST_NANOUSD, latency_ms=5) for c in calls
    ]
    answers = [_result(row, status, i) for i, (row, status) in enumerate(zip(claim.rows, statuses, strict=True))]
    results.save(conn, Save(claim=claim, seq=1, results=answers, ends=ends, releases=True))


_ERRORS: Mapping[RowStatus, str] = {RowStatus.FAILED: "invalid_request", RowStatus.INVALID: "invalid_output"}


def _result(row: int, status: RowStatus, seq: int) -> NewResult:
    kind = _ERRORS.get(status)
    return NewResult(
        row=row,
        status=status,
        output=None if kind else f"answer {row}",
        error_kind=kind,
        error=None if kind is None else f"what was wrong with row {row}",
        model="sim-chat",
        account="sim",
        usage=Usage(input=10, output=2),
        cost_nanousd=COST_NANOUSD,
        calls=1,
        seqs=(seq,),
    )
