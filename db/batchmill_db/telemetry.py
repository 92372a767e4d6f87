"""Statements about workers, the leader, accounts and device samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, select, update

from .bulk import insert_for
from .schema import account, chunk, job, leader, worker
from .session import now_ms

LIVE_STATES = ("starting", "ready", "draining")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One worker process. ``queues`` are the Celery queues it takes chunks from, ``slots`` how many at once."""

    id: str
    name: str
    host: str
    pid: int
    wing: str
    queues: Sequence[str]
    slots: int
    version: str
    device: str | None = None
    state: str = "starting"
    reason: str | None = None
    in_flight: int = 0
    capacity: int = 0
    throttled: str | None = None
    age_ms: int = 0  # since its last beat


def register(conn: Connection, w: WorkerRecord) -> None:
    """Notes that a worker process started. Idempotent."""
    insert_ = insert_for(conn.dialect.name)
    conn.execute(
        insert_(worker)
        .values(
            id=w.id,
            name=w.name,
            host=w.host,
            pid=w.pid,
            wing=w.wing,
            queues="," + ",".join(w.queues) + ",",
            device=w.device,
            slots=w.slots,
            capacity=w.capacity,
            state=w.state,
            version=w.version,
            started_ms=now_ms(),
            beat_ms=now_ms(),
        )
        .on_conflict_do_nothing()
    )


def beat(
    conn: Connection,
    worker_id: str,
    *,
    state: str,
    in_flight: int = 0,
    throttled: str | None = None,
    reason: str | None = None,
    load_ms: int | None = None,
) -> None:
    """A worker says that it lives and what it does. Idempotent."""
    values: dict[str, Any] = {"state": state, "in_flight": in_flight, "throttled": throttled, "beat_ms": now_ms()}
    if reason is not None:
        values["reason"] = reason
    if load_ms is not None:
        values["load_ms"] = load_ms
    conn.execute(update(worker).where(worker.c.id == worker_id).values(**values))


def live_workers(conn: Connection, *, within_ms: int = 15_000) -> list[WorkerRecord]:
    """Workers that gave a beat within ``within_ms``. Reads only."""
    rows = conn.execute(
        select(worker, (now_ms() - worker.c.beat_ms).label("age_ms"))
        .where(worker.c.beat_ms > now_ms() - within_ms, worker.c.state.in_(LIVE_STATES))
        .order_by(worker.c.name)
    )
    return [_record(r._mapping) for r in rows]


def unfit_workers(conn: Connection, *, within_ms: int = 600_000) -> list[WorkerRecord]:
    """Workers that could not start, with their reasons. Reads only."""
    rows = conn.execute(
        select(worker, (now_ms() - worker.c.beat_ms).label("age_ms")).where(
            worker.c.beat_ms > now_ms() - within_ms, worker.c.state == "unfit"
        )
    )
    return [_record(r._mapping) for r in rows]


def _record(m: Any) -> WorkerRecord:
    return WorkerRecord(
        **{
            k: m[k]
            for k in (
                "id",
                "name",
                "host",
                "pid",
                "wing",
                "slots",
                "version",
                "device",
                "state",
                "reason",
                "in_flight",
                "capacity",
                "throttled",
            )
        },
        queues=tuple(q for q in m["queues"].split(",") if q),
        age_ms=max(0, int(m["age_ms"])),
    )


def workers_of_process(conn: Connection, host: str, pid: int) -> list[str]:
    """Ids of the workers that ran as this process. Reads only."""
    return list(conn.execute(select(worker.c.id).where(worker.c.host == host, worker.c.pid == pid)).scalars())


def workers_of_host(conn: Connection, host: str) -> list[WorkerRecord]:
    """Workers of a host that have not said goodbye. Reads only."""
    rows = conn.execute(
        select(worker, (now_ms() - worker.c.beat_ms).label("age_ms")).where(
            worker.c.host == host, worker.c.state.in_(LIVE_STATES)
        )
    )
    return [_record(r._mapping) for r in rows]


def bury(conn: Connection, worker_ids: Sequence[str]) -> None:
    """Notes that worker processes are gone. Idempotent."""
    conn.execute(update(worker).where(worker.c.id.in_(worker_ids), worker.c.state != "unfit").values(state="gone"))


def prune_workers(conn: Connection, *, older_than_ms: int = 7 * 86_400_000) -> None:
    """Forgets workers that were not heard of for long. Idempotent."""
    conn.execute(delete(worker).where(worker.c.beat_ms < now_ms() - older_than_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """Whether this process leads, and how long ago any leader last ticked (None: never)."""

    leads: bool
    since_tick_ms: int | None


def lead(conn: Connection, name: str, holder: str, *, ttl_ms: int) -> Leadership:
    """Takes or keeps the lead by one conditional update; a leader that is silent for ``ttl_ms`` loses it."""
    before = conn.execute(
        select(leader.c.holder, (now_ms() - leader.c.tick_ms).label("since")).where(leader.c.name == name)
    ).one_or_none()
    insert_ = insert_for(conn.dialect.name)
    statement = insert_(leader).values(name=name, holder=holder, until_ms=now_ms() + ttl_ms, tick_ms=now_ms())
    taken = conn.execute(
        statement.on_conflict_do_update(
            index_elements=[leader.c.name],
            # Read again: a wait for another's transaction lies between the values above and this.
            set_={"holder": holder, "until_ms": now_ms() + ttl_ms, "tick_ms": now_ms()},
            where=(leader.c.holder == holder) | (leader.c.until_ms < now_ms()),
        ).returning(leader.c.holder)
    ).scalar_one_or_none()
    return Leadership(leads=taken == holder, since_tick_ms=None if before is None else int(before.since))


def resign(conn: Connection, name: str, holder: str) -> None:
    """Gives the lead up, so that another takes it at once. Idempotent."""
    conn.execute(update(leader).where(leader.c.name == name, leader.c.holder == holder).values(until_ms=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountState:
    name: str
    state: str
    reason_kind: str | None
    reason: str | None
    probe_at_ms: int | None
    probes: int


def stop_account(conn: Connection, name: str, *, kind: str, reason: str, probe_after_ms: int) -> bool:
    """Stops an account for all hosts and pauses its open jobs with the reason. Idempotent.

    Answers whether this call stopped it. Its chunks are not published until a probe finds it healed.
    """
    insert_ = insert_for(conn.dialect.name)
    statement = insert_(account).values(
        name=name,
        state="stopped",
        reason_kind=kind,
        reason=reason,
        probe_at_ms=now_ms() + probe_after_ms,
        probes=0,
        changed_ms=now_ms(),
    )
    new = statement.excluded
    stopped = conn.execute(
        statement.on_conflict_do_update(
            index_elements=[account.c.name],
            set_={
                "state": "stopped",
                "reason_kind": new.reason_kind,
                "reason": new.reason,
                "probe_at_ms": new.probe_at_ms,
                "probes": 0,
                "changed_ms": new.changed_ms,
            },
            where=account.c.state != "stopped",
        ).returning(account.c.name)
    ).scalar_one_or_none()
    queue = f"api.{name}"
    ids = conn.execute(
        select(job.c.id).where(
            job.c.state == "open",
            select(chunk.c.id)
            .where(chunk.c.job_id == job.c.id, chunk.c.queue == queue, chunk.c.state.in_(("ready", "leased")))
            .exists(),
        )
    ).scalars()
    from . import steering

    for job_id in list(ids):
        steering.pause(conn, job_id, kind="account", reason=f"account {name} is stopped: {reason}", account=name)
    return stopped is not None


def heal_account(conn: Connection, name: str) -> list[int]:
    """A probe succeeded or the user resumed: the account works again and its jobs go on. Idempotent."""
    from . import steering

    conn.execute(
        update(account)
        .where(account.c.name == name, account.c.state == "stopped")
        .values(state="ok", reason=None, reason_kind=None, probe_at_ms=None, changed_ms=now_ms())
    )
    return steering.resume_healed(conn, name)


def due_probes(conn: Connection, names: Sequence[str], *, next_after_ms: int) -> list[AccountState]:
    """Stopped accounts whose probe is due, each taken by one caller and put off for the next time."""
    due = conn.execute(
        update(account)
        .where(account.c.name.in_(names), account.c.state == "stopped", account.c.probe_at_ms <= now_ms())
        .values(probe_at_ms=now_ms() + next_after_ms, probes=account.c.probes + 1)
        .returning(account)
    )
    return [_account(r._mapping) for r in due]


def accounts(conn: Connection) -> dict[str, AccountState]:
    return {r.name: _account(r._mapping) for r in conn.execute(select(account))}


def _account(m: Any) -> AccountState:
    return AccountState(**{k: m[k] for k in ("name", "state", "reason_kind", "reason", "probe_at_ms", "probes")})
