"""Statements about chunks: claim, heartbeat, release, derive, merge, reap, publish.

A chunk is a set of row numbers of its job. Whoever claims it raises its fence; every later write of that attempt names
the fence, so that a worker that lost its lease cannot move the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, insert, literal_column, or_, select, update

from batchmill_core.job import CONTRACT_VERSION, ChunkState, JobState, Rows

from . import ledger
from .bulk import insert_for
from .schema import account, chunk, job, round_
from .session import now_ms

CRASH_LIMIT = 3

# In literals, so that the partial indexes of `schema` serve them.
_READY = chunk.c.state == literal_column("'ready'")
_LEASED = chunk.c.state == literal_column("'leased'")
_OPEN = job.c.state == literal_column("'open'")
_UNSUMMED = func.coalesce(chunk.c.unsummed_since_ms, now_ms())


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One attempt: the right to write for a chunk while ``fence`` stays."""

    chunk_id: int
    fence: int
    job_id: int
    job_name: str
    rows: Rows
    queue: str
    step: int
    round: int
    spec: str  # JSON of core.job.Spec
    budgeted: bool
    fresh: bool  # nothing of these rows was tried before in this round


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """Rows that an attempt hands on: to whom (queue, step) and not before when."""

    rows: Rows
    queue: str
    step: int
    wait_ms: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChunk:
    rows: Rows
    queue: str
    step: int = 0
    round: int = 1
    priority: int = 5


def add(conn: Connection, job_id: int, chunks: Iterable[NewChunk]) -> None:
    """Inserts ready chunks that have no parent. Not idempotent: the caller's payloads of the same transaction are."""
    values = [
        {
            "job_id": job_id,
            "rows": str(c.rows),
            "first_row": c.rows.first,
            "n_rows": len(c.rows),
            "queue": c.queue,
            "step": c.step,
            "round": c.round,
            "priority": c.priority,
            "contract": CONTRACT_VERSION,
            "state": ChunkState.READY,
        }
        for c in chunks
    ]
    if values:
        conn.execute(insert(chunk).values(created_ms=now_ms()), values)


def is_suspect(conn: Connection, chunk_id: int) -> bool:
    """Whether one more crash halves the chunk, or ends its one row: it should run alone, so that none other is blamed."""
    count = conn.execute(select(chunk.c.crash_count).where(chunk.c.id == chunk_id)).scalar_one_or_none()
    return count is not None and count >= CRASH_LIMIT - 1


def claim(conn: Connection, chunk_id: int, worker_id: str, *, lease_ms: int) -> Claim | None:
    """Takes a ready chunk of an open job for ``lease_ms``; None when it is not to be had.

    One conditional update: of any number of workers that are told of the chunk, one gets it. A lost answer is healed by
    the lease. A chunk of a newer contract than this code knows stays for workers that know it.
    """
    job_is_open = select(job.c.id).where(job.c.id == chunk.c.job_id, job.c.state == JobState.OPEN).exists()
    taken = conn.execute(
        update(chunk)
        .where(
            chunk.c.id == chunk_id,
            chunk.c.state == ChunkState.READY,
            chunk.c.not_before_ms <= now_ms(),
            chunk.c.contract <= CONTRACT_VERSION,
            job_is_open,
        )
        .values(
            state=ChunkState.LEASED,
            fence=chunk.c.fence + 1,
            save_seq=0,
            lease_owner=worker_id,
            lease_until_ms=now_ms() + lease_ms,
            first_claim_ms=func.coalesce(chunk.c.first_claim_ms, now_ms()),
        )
        .returning(
            chunk.c.fence,
            chunk.c.job_id,
            chunk.c.rows,
            chunk.c.queue,
            chunk.c.step,
            chunk.c.round,
            chunk.c.parent_id,
        )
    ).one_or_none()
    if taken is None:
        return None
    about = conn.execute(
        select(job.c.name, job.c.budget_nanousd, round_.c.spec)
        .join(round_, round_.c.job_id == job.c.id)
        .where(job.c.id == taken.job_id, round_.c.round == taken.round)
    ).one()
    return Claim(
        chunk_id=chunk_id,
        fence=taken.fence,
        job_id=taken.job_id,
        job_name=about.name,
        rows=Rows.parse(taken.rows),
        queue=taken.queue,
        step=taken.step,
        round=taken.round,
        spec=about.spec,
        budgeted=about.budget_nanousd is not None,
        fresh=taken.fence == 1 and taken.parent_id is None and taken.round == 1,
    )


def heartbeat(conn: Connection, leases: Mapping[int, int], *, lease_ms: int) -> set[int]:
    """Extends the leases of an owner's chunks (id to fence); answers the ids that it no longer owns. Idempotent."""
    lost = set()
    for chunk_id, fence in sorted(leases.items()):
        kept = conn.execute(
            update(chunk)
            .where(chunk.c.id == chunk_id, chunk.c.fence == fence, chunk.c.state == ChunkState.LEASED)
            .values(lease_until_ms=now_ms() + lease_ms)
        )
        if kept.rowcount == 0:
            lost.add(chunk_id)
    return lost


def release(conn: Connection, claim: Claim, children: Sequence[Child] = ()) -> bool:
    """Ends an attempt: the chunk is `done` and its unfinished rows live on in child chunks.

    Fenced. Idempotent: when the same attempt already ended (a commit whose answer was lost) nothing changes. Answers
    whether the attempt has ended by its own hand. Calls it left open are `unknown` from then on. Children of a cancelled
    job are born cancelled.
    """
    closed = conn.execute(
        update(chunk)
        .where(chunk.c.id == claim.chunk_id, chunk.c.fence == claim.fence, chunk.c.state == ChunkState.LEASED)
        .values(state=ChunkState.DONE, done_fence=claim.fence, lease_owner=None, lease_until_ms=None)
    )
    if closed.rowcount == 0:
        done = conn.execute(select(chunk.c.done_fence).where(chunk.c.id == claim.chunk_id)).scalar_one_or_none()
        return done == claim.fence
    ledger.orphan(conn, claim.chunk_id, claim.fence, kind="released")
    if children:
        derive(conn, claim, children, cancelled=_is_cancelled(conn, claim.job_id))
    return True


def _is_cancelled(conn: Connection, job_id: int) -> bool:
    """Locks the job's row: a cancel that comes now waits, and then finds the children that are born meanwhile."""
    state = select(job.c.state).where(job.c.id == job_id).with_for_update(read=True)
    return conn.execute(state).scalar_one_or_none() == JobState.CANCELLED


def derive(
    conn: Connection, claim: Claim, children: Sequence[Child], *, cancelled: bool = False, crash_count: int = 0
) -> None:
    """Inserts child chunks; unique on (parent, fence, step, queue, not_before, first row), so a repeat adds nothing."""
    insert_ = insert_for(conn.dialect.name)
    parent = conn.execute(select(chunk.c.priority, chunk.c.contract).where(chunk.c.id == claim.chunk_id)).one()
    now: int = conn.execute(select(now_ms())).scalar_one()
    for child in children:
        conn.execute(
            insert_(chunk)
            .values(
                job_id=claim.job_id,
                parent_id=claim.chunk_id,
                parent_fence=claim.fence,
                rows=str(child.rows),
                first_row=child.rows.first,
                n_rows=len(child.rows),
                queue=child.queue,
                step=child.step,
                round=claim.round,
                contract=parent.contract,
                priority=parent.priority,
                state=ChunkState.CANCELLED if cancelled else ChunkState.READY,
                not_before_ms=now + child.wait_ms if child.wait_ms else 0,
                crash_count=crash_count,
                last_error=child.error,
                created_ms=now,
            )
            .on_conflict_do_nothing()
        )


def expire_leases(conn: Connection, *, worker_ids: Sequence[str]) -> int:
    """Ends the leases of workers known to be dead, so that the next tick reaps them at once. Idempotent."""
    return conn.execute(
        update(chunk).where(_LEASED, chunk.c.lease_owner.in_(worker_ids)).values(lease_until_ms=0)
    ).rowcount


def extend_all(conn: Connection, by_ms: int) -> int:
    """After an outage of the database: gives every live lease time for a beat before any is reaped. Idempotent."""
    least = now_ms() + by_ms
    return conn.execute(
        update(chunk)
        .where(_LEASED, chunk.c.lease_until_ms < least, chunk.c.lease_until_ms > 0)
        .values(lease_until_ms=least)
    ).rowcount


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What became of one chunk whose lease had expired."""

    chunk_id: int
    job_id: int
    crash_count: int
    outcome: str  # ready, split, dead, done, cancelled


def reap(conn: Connection, *, limit: int = 100) -> list[Reaped]:
    """Takes expired leases back: `ready` again, and one more crash counted; a chunk that keeps crashing is halved.

    Each expiry is one conditional update, so a heartbeat in between wins. The dead attempt's reserved calls become
    `unknown`. At `CRASH_LIMIT` a chunk of several rows becomes two children that are halved at their next crash; a
    single row is `dead`. Chunks that wait in the same queues are publishable anew, since a worker that died may have
    taken their messages along. Idempotent: a chunk is reaped once per fence.
    """
    due = conn.execute(
        select(chunk.c.id, chunk.c.fence)
        .where(_LEASED, chunk.c.lease_until_ms < now_ms())
        .order_by(chunk.c.lease_until_ms)
        .limit(limit)
    ).all()
    reaped = [r for r in (_reap_one(conn, chunk_id, fence) for chunk_id, fence in due) if r is not None]
    if reaped:
        queues = select(chunk.c.queue).where(chunk.c.id.in_([r.chunk_id for r in reaped])).distinct()
        conn.execute(
            update(chunk)
            .where(_READY, chunk.c.published_ms.is_not(None), chunk.c.queue.in_(queues))
            .values(published_ms=None)
        )
    return reaped


def crash(conn: Connection, claim: Claim) -> Reaped | None:
    """Gives an attempt up that lost its engine, as if its worker had died: one more crash is counted.

    Fenced. Idempotent: an attempt is given up once; None when it is no longer the owner.
    """
    conn.execute(
        update(chunk)
        .where(chunk.c.id == claim.chunk_id, chunk.c.fence == claim.fence, chunk.c.state == ChunkState.LEASED)
        .values(lease_until_ms=0)
    )
    return _reap_one(conn, claim.chunk_id, claim.fence)


def _reap_one(conn: Connection, chunk_id: int, fence: int) -> Reaped | None:
    taken = conn.execute(
        update(chunk)
        .where(
            chunk.c.id == chunk_id,
            chunk.c.fence == fence,
            chunk.c.state == ChunkState.LEASED,
            chunk.c.lease_until_ms < now_ms(),
        )
        .values(
            state=ChunkState.READY,
            fence=fence + 1,
            crash_count=chunk.c.crash_count + 1,
            published_ms=None,
            not_before_ms=0,
            lease_owner=None,
            lease_until_ms=None,
            last_error="its worker died or lost its lease",
        )
        .returning(chunk.c.job_id, chunk.c.crash_count, chunk.c.rows, chunk.c.queue, chunk.c.step, chunk.c.round)
    ).one_or_none()
    if taken is None:
        return None
    ledger.orphan(conn, chunk_id, fence)
    outcome = "ready"
    if _is_cancelled(conn, taken.job_id):
        conn.execute(update(chunk).where(chunk.c.id == chunk_id).values(state=ChunkState.CANCELLED))
        outcome = "cancelled"
    elif taken.crash_count >= CRASH_LIMIT:
        outcome = _isolate(conn, chunk_id, fence + 1, taken)
    return Reaped(chunk_id=chunk_id, job_id=taken.job_id, crash_count=taken.crash_count, outcome=outcome)


def _parent(chunk_id: int, fence: int, about: Any, rows: Rows) -> Claim:
    """A chunk that nobody runs, as the parent of the children that the dispatcher derives from it."""
    return Claim(
        chunk_id=chunk_id,
        fence=fence,
        job_id=about.job_id,
        job_name="",
        rows=rows,
        queue=about.queue,
        step=about.step,
        round=about.round,
        spec="",
        budgeted=False,
        fresh=False,
    )


def _isolate(conn: Connection, chunk_id: int, fence: int, taken: Any) -> str:
    rows = unfinished(conn, taken.job_id, Rows.parse(taken.rows), taken.round)
    if not rows:
        conn.execute(update(chunk).where(chunk.c.id == chunk_id).values(state=ChunkState.DONE, done_fence=fence))
        return "done"
    if len(rows) == 1:
        _give_up(conn, chunk_id, taken, rows)
        return "dead"
    attempt = _parent(chunk_id, fence, taken, rows)
    halves = [Child(rows=h, queue=taken.queue, step=taken.step, error="halved after crashes") for h in rows.halves()]
    derive(conn, attempt, halves, crash_count=CRASH_LIMIT - 1)
    conn.execute(update(chunk).where(chunk.c.id == chunk_id).values(state=ChunkState.DONE, done_fence=fence))
    return "split"


def _give_up(conn: Connection, chunk_id: int, taken: Any, rows: Rows) -> None:
    """The chunk is `dead`, and so is its row unless it keeps a result of an earlier round."""
    from .results import finished

    answered = bool(finished(conn, taken.job_id, rows, 0))
    conn.execute(
        update(chunk)
        .where(chunk.c.id == chunk_id)
        .values(
            state=ChunkState.DEAD,
            last_error=f"row {rows.first} brought its worker down {taken.crash_count} times",
            rows=str(rows),
            first_row=rows.first,
            n_rows=1,
            n_dead=chunk.c.n_dead + (0 if answered else 1),
            unsummed_since_ms=_UNSUMMED,
        )
    )


def unfinished(conn: Connection, job_id: int, rows: Rows, round_number: int) -> Rows:
    """The rows that have no final result of this round. Reads only."""
    from .results import finished

    done = finished(conn, job_id, rows, round_number)
    return Rows.of(n for n in rows if n not in done)


def merge(conn: Connection, *, limit_rows: int = 1000) -> int:
    """Joins small ready children of the same (job, step, round, queue) that are due; answers how many went away.

    The joined rows live on in one new child of the first; the others become `done`. Chunks that crashed stay apart, so
    that the row at fault is still found. Idempotent per transaction.
    """
    groups = conn.execute(
        select(chunk.c.job_id, chunk.c.step, chunk.c.round, chunk.c.queue)
        .where(
            _READY,
            chunk.c.parent_id.is_not(None),
            chunk.c.crash_count == 0,
            chunk.c.not_before_ms <= now_ms(),
        )
        .group_by(chunk.c.job_id, chunk.c.step, chunk.c.round, chunk.c.queue)
        .having(func.count() > 1)
        .limit(50)
    ).all()
    return sum(_merge_group(conn, g, limit_rows) for g in groups)


def _merge_group(conn: Connection, group: Any, limit_rows: int) -> int:
    members = conn.execute(
        select(chunk.c.id, chunk.c.rows, chunk.c.n_rows, chunk.c.fence)
        .where(
            _READY,
            chunk.c.parent_id.is_not(None),
            chunk.c.crash_count == 0,
            chunk.c.not_before_ms <= now_ms(),
            chunk.c.job_id == group.job_id,
            chunk.c.step == group.step,
            chunk.c.round == group.round,
            chunk.c.queue == group.queue,
        )
        .order_by(chunk.c.id)
        .limit(200)
    ).all()
    taken, size = [], 0
    for m in members:
        if size + m.n_rows <= limit_rows:
            taken.append(m)
            size += m.n_rows
    if len(taken) < 2:
        return 0
    gone = conn.execute(
        update(chunk)
        .where(chunk.c.id.in_([m.id for m in taken]), chunk.c.state == ChunkState.READY)
        .values(state=ChunkState.DONE, last_error="merged", fence=chunk.c.fence + 1)
        .returning(chunk.c.id, chunk.c.rows, chunk.c.fence)
    ).all()
    if not gone:
        return 0
    rows = Rows.of(n for m in gone for n in Rows.parse(m.rows))
    first = min(gone, key=lambda m: m.id)
    attempt = _parent(first.id, first.fence, group, rows)
    derive(conn, attempt, [Child(rows=rows, queue=group.queue, step=group.step)])
    return len(gone) - 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCounts:
    """How a job's chunks stand, and what keeps the ready ones waiting."""

    by_state: Mapping[str, int]
    next_due_ms: int | None  # the earliest not_before of a ready chunk that is not due yet
    queues: Sequence[str]


def counts(conn: Connection, job_id: int) -> ChunkCounts:
    grouped = conn.execute(select(chunk.c.state, func.count()).where(chunk.c.job_id == job_id).group_by(chunk.c.state))
    by_state = {str(state): int(count) for state, count in grouped}
    waiting = conn.execute(
        select(func.min(chunk.c.not_before_ms)).where(
            chunk.c.job_id == job_id, _READY, chunk.c.not_before_ms > now_ms()
        )
    ).scalar_one()
    queues: set[str] = set()
    for state in (_READY, _LEASED):
        queues.update(conn.execute(select(chunk.c.queue).where(chunk.c.job_id == job_id, state).distinct()).scalars())
    return ChunkCounts(by_state=by_state, next_due_ms=waiting, queues=sorted(queues))


def dead_rows(conn: Connection, job_id: int) -> dict[int, str]:
    """Rows that brought their workers down, with why. One that has a result (of an earlier round) is not dead for it."""
    found = conn.execute(
        select(chunk.c.rows, chunk.c.last_error).where(chunk.c.job_id == job_id, chunk.c.state == ChunkState.DEAD)
    )
    return {n: r.last_error or "" for r in found for n in Rows.parse(r.rows)}


def clear_dead(conn: Connection, job_id: int) -> None:
    """A retry takes the dead rows up again: their old chunks are `done`. Idempotent."""
    conn.execute(
        update(chunk)
        .where(chunk.c.job_id == job_id, chunk.c.state == ChunkState.DEAD)
        .values(state=ChunkState.DONE, n_dead=0, unsummed_since_ms=_UNSUMMED)
    )


def overdue(conn: Connection, queues: Sequence[str], *, waited_ms: int, limit: int = 8) -> list[int]:
    """Ready chunks of these queues that were due ``waited_ms`` ago and that nobody took. Reads only."""
    jobs, stopped = _open_jobs(conn), _stopped_queues(conn)
    before = now_ms() - waited_ms
    found: list[Any] = []
    for queue in set(queues) - stopped:
        found += _next(conn, jobs, queue, limit, chunk.c.not_before_ms <= before, chunk.c.created_ms <= before)
    return [r.id for r in sorted(found, key=lambda r: (r.priority, r.id))[:limit]]
