"""A database with jobs, chunks and workers that behave, in few words, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Table, select

from batchmill_core.errors import CallState
from batchmill_core.job import Rows, Spec, Step
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import Usage
from batchmill_db import (
    booking,
    chunks,
    counters,
    doorbells,
    jobs,
    payload_store,
    reaping,
    results,
    rounds,
    schema,
    steering,
)
from batchmill_db.booking import NewCall, Reservation
from batchmill_db.chunks import Child, Claim, NewChunk
from batchmill_db.jobs import JobRecord, NewJob
from batchmill_db.ledger import CallEnd
from batchmill_db.reaping import Reaped
from batchmill_db.results import NewResult, Save, Saved
from batchmill_db.session import Database

QUEUE = "api.acme"
BOUND = 1000
COST = 100
USAGE = Usage(input=40, output=3)
LEASE_MS = 600_000


class World:
    """Each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self.database = database

    # producing

    def job(
        self,
        *,
        sizes: Sequence[int] = (4,),
        budget: int | None = None,
        name: str = "reviews",
        key: str | None = None,
        queue: str = QUEUE,
        priority: int = 5,
    ) -> int:
        """An open job with one chunk, and one payload, per size."""
        job_id = self.loading(name=name, key=key, budget=budget)
        first = 0
        with self.database.transaction() as conn:
            for size in sizes:
                payload_store.add_payloads(conn, job_id, [(first, size, b"requests", b"inputs", f"digest {first}")])
                chunks.add(conn, job_id, [NewChunk(rows=Rows.span(first, size), queue=queue, priority=priority)])
                first += size
            jobs.set_progress(conn, job_id, n_rows=first, n_skipped=0, skipped=[], columns=["text"])
            jobs.mark_loaded(conn, job_id)
        return job_id

    def loading(self, *, name: str = "reviews", key: str | None = None, budget: int | None = None) -> int:
        with self.database.transaction() as conn:
            return jobs.create(
                conn, NewJob(name=name, model="small", spec=spec(), key=key, budget_nanousd=budget, source="a.jsonl")
            )

    def get(self, job_id: int) -> JobRecord:
        """The job with its counters up to date."""
        with self.database.transaction() as conn:
            counters.sum_counters(conn)
            return jobs.get(conn, job_id)

    def retry(self, job_id: int, statuses: Sequence[RowStatus]) -> list[int]:
        """Opens the next round for rows of these statuses; answers its chunks."""
        with self.database.transaction() as conn:
            rows = rounds.rows_of_status(conn, job_id, statuses)
            number = jobs.get(conn, job_id).round + 1
            assert rounds.reopen(conn, job_id, number)
            rounds.add_round(conn, job_id, number, spec(), statuses=statuses)
            if RowStatus.DEAD in statuses:
                reaping.clear_dead(conn, job_id)
            chunks.add(conn, job_id, [NewChunk(rows=rows, queue=QUEUE, round=number)])
        return [c["id"] for c in self.chunks(job_id) if c["round"] == number]

    # looking

    def table(self, table: Table, *conditions: Any) -> list[dict[str, Any]]:
        with self.database.reading() as conn:
            found = conn.execute(select(table).where(*conditions).order_by(*table.primary_key.columns))
            return [dict(r._mapping) for r in found]

    def chunks(self, job_id: int, *, state: str | None = None) -> list[dict[str, Any]]:
        found = self.table(schema.chunk, schema.chunk.c.job_id == job_id)
        return [c for c in found if state is None or c["state"] == state]

    def chunk(self, chunk_id: int) -> dict[str, Any]:
        return self.table(schema.chunk, schema.chunk.c.id == chunk_id)[0]

    def results(self, job_id: int) -> dict[int, dict[str, Any]]:
        return {r["row"]: r for r in self.table(schema.result, schema.result.c.job_id == job_id)}

    def calls(self, job_id: int) -> list[dict[str, Any]]:
        return self.table(schema.call, schema.call.c.job_id == job_id)

    def states(self, job_id: int) -> list[str]:
        """States of the job's chunks in order of their ids."""
        return [c["state"] for c in self.chunks(job_id)]

    # working

    def claim(self, chunk_id: int, worker: str = "w1") -> Claim | None:
        with self.database.transaction() as conn:
            return chunks.claim(conn, chunk_id, worker, lease_ms=LEASE_MS)

    def take(self, job_id: int, worker: str = "w1") -> Claim:
        """Claims the first ready chunk of a job."""
        claim = self.claim(self.chunks(job_id, state="ready")[0]["id"], worker)
        assert claim is not None
        return claim

    def reserve(self, claim: Claim, seqs: Sequence[int], *, rows: Sequence[Rows] | None = None) -> Reservation:
        """Books calls; call number n is for the chunk's n-th row unless ``rows`` says otherwise."""
        booked = [call_of(claim, s, Rows.of([claim.rows[i]]) if rows is None else rows[i]) for i, s in enumerate(seqs)]
        with self.database.transaction() as conn:
            return booking.reserve(conn, booked, budgeted=claim.budgeted)

    def save(
        self,
        claim: Claim,
        seq: int,
        rows: Sequence[NewResult] = (),
        ends: Sequence[CallEnd] = (),
        *,
        children: Sequence[Child] = (),
        releases: bool = False,
    ) -> Saved:
        work = Save(claim=claim, seq=seq, results=rows, ends=ends, children=children, releases=releases)
        with self.database.transaction() as conn:
            return results.save(conn, work)

    def answer_all(self, claim: Claim, *, status: RowStatus = RowStatus.OK, releases: bool = True) -> Saved:
        """The whole attempt: books a call per row, answers each, saves and releases."""
        seqs = range(1, len(claim.rows) + 1)
        assert self.reserve(claim, seqs).refusal is None
        rows = [answered(row, seq, status) for row, seq in zip(claim.rows, seqs, strict=True)]
        return self.save(claim, 1, rows, [settled(s) for s in seqs], releases=releases)

    def release(self, claim: Claim, children: Sequence[Child] = ()) -> bool:
        with self.database.transaction() as conn:
            return chunks.release(conn, claim, children)

    # dispatching

    def crash(self, *workers: str) -> list[Reaped]:
        """The workers died: their leases run out and are reaped."""
        with self.database.transaction() as conn:
            reaping.expire_leases(conn, worker_ids=workers or ("w1",))
            return reaping.reap(conn)

    def ring(self, queue: str = QUEUE, *, window: int = 10, again_after_ms: int = 60_000) -> list[int]:
        with self.database.transaction() as conn:
            return [b.chunk_id for b in doorbells.ring(conn, windows={queue: window}, again_after_ms=again_after_ms)]

    def finish(self) -> list[int]:
        with self.database.transaction() as conn:
            return steering.finish(conn)


def spec() -> Spec:
    return Spec(task=TaskKind.CHAT, steps=(Step(model="small", upstream="small-1", queue=QUEUE, account="acme"),))


def call_of(claim: Claim, seq: int, rows: Rows, *, bound: int | None = BOUND) -> NewCall:
    return NewCall(
        chunk_id=claim.chunk_id,
        fence=claim.fence,
        seq=seq,
        job_id=claim.job_id,
        round=claim.round,
        rows=rows,
        model="small",
        worker="host/w1",
        account="acme",
        bound_nanousd=bound,
    )


def answered(row: int, seq: int, status: RowStatus = RowStatus.OK, **more: Any) -> NewResult:
    known: dict[str, Any] = {
        "output": f"answer {row}",
        "usage": USAGE,
        "cost_nanousd": COST,
        "calls": 1,
        "seqs": (seq,),
    }
    return NewResult(row=row, status=status, **(known | more))


def settled(seq: int, *, cost: int | None = COST, **more: Any) -> CallEnd:
    known: dict[str, Any] = {"bound_nanousd": BOUND, "usage": USAGE, "request_id": f"request {seq}"}
    return CallEnd(seq=seq, state=CallState.SETTLED, cost_nanousd=cost, **(known | more))


def ended(seq: int, state: CallState) -> CallEnd:
    return CallEnd(seq=seq, state=state, bound_nanousd=BOUND)


def child(rows: Iterable[int], *, queue: str = QUEUE, step: int = 0, wait_ms: int = 0) -> Child:
    return Child(rows=Rows.of(rows), queue=queue, step=step, wait_ms=wait_ms)
