"""Two workers, a dispatcher and a user do anything in any order: the invariants hold after each step."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, text

from batchmill_core.errors import CallState, JobError
from batchmill_core.job import JobState, Rows
from batchmill_core.request import BAD_STATUSES, PAID_STATUSES, RowStatus
from batchmill_db import counters, doorbells, jobs, merging, reaping, results, rounds, saved_results, steering
from batchmill_db.chunks import Claim
from batchmill_db.results import NewResult, Save
from batchmill_db.schema import metadata
from batchmill_db.session import Database
from batchmill_db.verify import as_lines, verify
from tests.conformance.db.world import BOUND, COST, QUEUE, World, answered, child, ended, settled

STATUSES = st.sampled_from([RowStatus.OK, RowStatus.OK, RowStatus.FAILED, RowStatus.INVALID, RowStatus.REFUSED])
ENDS = st.sampled_from([CallState.SETTLED, CallState.SETTLED, CallState.VOID, CallState.UNKNOWN])
N_ROWS = 7


class Attempt:
    """What one worker remembers of its run of a chunk: it may have lost the chunk without knowing."""

    def __init__(self, claim: Claim, earlier: dict[int, RowStatus], todo: list[int]) -> None:
        self.claim = claim
        self.earlier = earlier
        self.todo = todo
        self.open: dict[int, int] = {}  # seq of a booked call: its row
        self.tries: dict[int, list[int]] = {}  # row: seqs of calls that settled
        self.calls = 0
        self.saves = 0
        self.last: Save | None = None


class Machine(RuleBasedStateMachine):
    attempts = Bundle("attempts")
    database: Database

    @initialize(
        target=attempts,
        budget=st.sampled_from([None, 12 * BOUND]),
        sizes=st.sampled_from([(N_ROWS,), (3, 4), (1,) * N_ROWS]),
    )
    def submit(self, budget: int | None, sizes: tuple[int, ...]) -> Any:
        """A job, and one attempt that has begun, so that no run is without any."""
        _empty(self.database)
        self.world = World(self.database)
        self.job_id = self.world.job(sizes=sizes, budget=budget)
        self.saved: dict[int, tuple[Any, ...]] = {}  # row: (round, output, chunk, fence) as last seen
        return self._attempt("w1", 0, 3)

    @rule(target=attempts, worker=st.sampled_from(["w1", "w2"]), pick=st.integers(0, 9), n=st.integers(0, 4))
    def claim(self, worker: str, pick: int, n: int) -> Any:
        return self._attempt(worker, pick, n)

    def _attempt(self, worker: str, pick: int, n: int) -> Any:
        ready = self.world.chunks(self.job_id, state="ready")
        claim = self.world.claim(ready[pick % len(ready)]["id"], worker) if ready else None
        if claim is None:
            return multiple()
        with self.database.reading() as conn:
            done = saved_results.finished(conn, claim.job_id, claim.rows, claim.round)
            earlier = saved_results.earlier(conn, claim.job_id, claim.rows, claim.round)
        attempt = Attempt(claim, earlier, [n for n in claim.rows if n not in done])
        self.reserve(attempt, n)
        return attempt

    def reserve(self, attempt: Attempt, n: int) -> None:
        wanted = [row for row in attempt.todo if row not in attempt.open.values()][:n]
        seqs = range(attempt.calls + 1, attempt.calls + 1 + len(wanted))
        if not wanted:
            return
        booked = self.world.reserve(attempt.claim, seqs, rows=[Rows.of([r]) for r in wanted])
        attempt.calls += len(wanted)
        attempt.open.update(zip(list(seqs)[: booked.accepted], wanted, strict=False))

    @rule(attempt=attempts, end=ENDS, status=STATUSES, final=st.booleans(), n=st.integers(0, 2))
    def answer(self, attempt: Attempt, end: CallState, status: RowStatus, final: bool, n: int) -> None:
        self._save(attempt, end, status, final=final)
        self.reserve(attempt, n)

    @rule(attempt=attempts, end=ENDS, status=STATUSES)
    def answer_and_release(self, attempt: Attempt, end: CallState, status: RowStatus) -> None:
        self._save(attempt, end, status, final=True, releases=True)

    def _save(
        self, attempt: Attempt, end: CallState, status: RowStatus, *, final: bool, releases: bool = False
    ) -> None:
        """One call came back: it ends its row, or is tried again. A worker that lost its chunk does the same."""
        rows: list[NewResult] = []
        ends = []
        if attempt.open:
            seq, row = attempt.open.popitem()
            ends.append(settled(seq) if end is CallState.SETTLED else ended(seq, end))
            if end is not CallState.VOID:
                attempt.tries.setdefault(row, []).append(seq)
            if final and (end is CallState.SETTLED or status not in PAID_STATUSES):
                rows.append(self._result(attempt, row, status, ends[0].state))
        attempt.saves += 1
        left = [r for r in attempt.todo if r not in {n.row for n in rows}]
        children = [child(left[:2])] if left else []
        children += [child(left[2:], queue="api.other")] if left[2:] else []
        attempt.last = Save(
            claim=attempt.claim, seq=attempt.saves, results=rows, ends=ends, children=children, releases=releases
        )
        attempt.todo = left
        self.repeat(attempt)

    def _result(self, attempt: Attempt, row: int, status: RowStatus, end: CallState) -> NewResult:
        seqs = attempt.tries.get(row, [])
        lines = [c for c in self.world.calls(self.job_id) if c["chunk_id"] == attempt.claim.chunk_id]
        own = {c["seq"]: c["state"] for c in lines if c["fence"] == attempt.claim.fence}
        paid = sum(1 for s in seqs if own.get(s) == "settled") + (1 if end is CallState.SETTLED else 0)
        cost = paid * COST if paid else None
        return answered(
            row, 0, status, seqs=tuple(seqs), calls=len(seqs), cost_nanousd=cost, replaces=attempt.earlier.get(row)
        )

    @rule(attempt=attempts)
    def save_again(self, attempt: Attempt) -> None:
        self.repeat(attempt)

    def repeat(self, attempt: Attempt) -> None:
        """The answer to a commit was lost, so the save is done again."""
        if attempt.last is not None:
            work = attempt.last
            self.database.run(lambda conn: results.save(conn, work))

    @rule(attempt=consumes(attempts))
    def drain(self, attempt: Attempt) -> None:
        self.world.release(attempt.claim, [child(attempt.todo)] if attempt.todo else [])

    @rule(workers=st.sampled_from([("w1",), ("w2",), ("w1", "w2")]))
    def crash(self, workers: tuple[str, ...]) -> None:
        """Their leases run out. The attempts go on as zombies: they may still save."""
        self.world.crash(*workers)

    @rule()
    def tick(self) -> None:
        self.world.ring()
        self.world.ring("api.other")
        with self.database.transaction() as conn:
            merging.merge(conn)
            counters.sum_counters(conn)
        self.world.finish()

    @rule(
        wish=st.integers(0, 11), statuses=st.sampled_from([*([s] for s in sorted(BAD_STATUSES)), sorted(BAD_STATUSES)])
    )
    def user(self, wish: int, statuses: list[RowStatus]) -> None:
        if wish == 9:  # rarely, since little happens afterwards
            self._cancel()
        elif self.world.get(self.job_id).state is JobState.DONE:
            self._retry(statuses)
        else:
            self._pause_and_resume()

    def _pause_and_resume(self) -> None:
        with self.database.transaction() as conn:
            paused = steering.pause(conn, self.job_id, kind="user", reason="lunch")
        if paused:
            self.nothing_is_broken()
            assert [self.world.claim(c["id"]) for c in self.world.chunks(self.job_id, state="ready")[:1]] in (
                [],
                [None],
            )
            with self.database.transaction() as conn:
                steering.resume(conn, self.job_id)

    def _cancel(self) -> None:
        with self.database.transaction() as conn:
            try:
                steering.cancel(conn, self.job_id)
            except JobError:
                assert jobs.get(conn, self.job_id).state is JobState.DONE

    def _retry(self, statuses: list[RowStatus]) -> None:
        if self.world.get(self.job_id).state is JobState.DONE:
            with self.database.reading() as conn:
                rows = rounds.rows_of_status(conn, self.job_id, statuses)
            if rows:
                self.world.retry(self.job_id, statuses)

    def teardown(self) -> None:
        """Whatever happened, a worker that does all that is to be had ends the job."""
        if hasattr(self, "world") and self.world.get(self.job_id).state is JobState.OPEN:
            self.world.crash("w1", "w2")
            with self.database.transaction() as conn:
                steering.resume(conn, self.job_id, budget_nanousd=10**9)
            for c in self.world.chunks(self.job_id, state="ready"):
                claim = self.world.claim(c["id"], "w3")
                assert claim is not None
                self._answer(Attempt(claim, {}, list(claim.rows)))
            self.world.finish()
            assert self.world.get(self.job_id).state is JobState.DONE
            self.nothing_is_broken()

    def _answer(self, attempt: Attempt) -> None:
        claim = attempt.claim
        with self.database.reading() as conn:
            done = saved_results.finished(conn, claim.job_id, claim.rows, claim.round)
            earlier = saved_results.earlier(conn, claim.job_id, claim.rows, claim.round)
        rows = [n for n in claim.rows if n not in done]
        seqs = range(1, len(rows) + 1)
        if rows:
            self.world.reserve(claim, seqs, rows=[Rows.of([n]) for n in rows])
        made = [answered(n, s, replaces=earlier.get(n)) for n, s in zip(rows, seqs, strict=True)]
        self.world.save(claim, 1, made, [settled(s) for s in seqs], releases=True)

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "world"):
            with self.database.reading() as conn:
                assert as_lines(verify(conn, self.job_id)) == []

    @invariant()
    def a_saved_result_stays_until_a_later_round(self) -> None:
        if hasattr(self, "world"):
            now = {
                n: (r["round"], r["output"], r["chunk_id"], r["fence"])
                for n, r in self.world.results(self.job_id).items()
            }
            for row, before in self.saved.items():
                assert now[row] == before or now[row][0] > before[0], f"row {row} was {before}, is {now[row]}"
            self.saved = now

    @invariant()
    def ready_chunks_can_be_rung(self) -> None:
        if hasattr(self, "world") and self.world.get(self.job_id).state is JobState.OPEN:
            with self.database.reading() as conn:
                work = doorbells.queues_with_work(conn)
            assert set(work) <= {QUEUE, "api.other"}


def _empty(database: Database) -> None:
    with database.transaction() as conn:
        for table in reversed(metadata.sorted_tables):
            conn.execute(text(f'DELETE FROM "{table.name}"'))


@pytest.mark.slow
def test_no_order_of_events_breaks_an_invariant(migrated_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaping, "CRASH_LIMIT", 2)  # so that few steps bring halves and dead rows
    database = Database(migrated_url)
    if database.dialect == "sqlite":  # no crash of the machine is played here, so no commit needs to wait for the disk
        event.listen(database.engine, "connect", lambda c, _: c.execute("PRAGMA synchronous=OFF"))

    class Here(Machine):
        pass

    Here.database = database
    n = 25 if database.dialect == "sqlite" else 10
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=n,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # making a failure shorter takes minutes, and 25 steps can be read
        ),
    )
    database.close()
