"""Why rows of a job wait, and why a job cannot go on: sentences that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from batchmill_core.job import ChunkState, JobState
from batchmill_db.jobs import JobRecord
from batchmill_db.telemetry import WorkerRecord

from .report import Situation

STARTING = "starting"
Remedy = Callable[[Situation, str], str]  # what to do when no live worker serves this queue of the job


def why_waiting(situation: Situation, *, remedy: Remedy, now_ms: int) -> list[str]:
    """Why rows wait just now, the weightiest first; empty when they don't. ``now_ms`` is milliseconds since 1970."""
    job = situation.report.job
    if job.ended or job.state is JobState.PAUSED:  # it doesn't wait, it is stopped: see `stopped_because`
        return []
    if job.state is JobState.LOADING:
        return [_still_read(job)]
    reasons = [*_stopped_accounts(situation), *_unserved(situation, remedy)]
    reasons += [*_busy_workers(situation), *_due_later(situation, now_ms)]
    if not job.loaded and job.done == job.n_rows:
        reasons.append(_still_read(job))
    return list(dict.fromkeys(reasons))


def _still_read(job: JobRecord) -> str:
    return f"the data set is still being read: {job.n_rows:,} rows so far"


def stopped_because(situation: Situation) -> str | None:
    """Why the job cannot go on by itself, with what to do; None when it can, or is done."""
    job = situation.report.job
    if job.state is JobState.PAUSED:
        return f"job {job.public_id} is paused: {_clause(job.reason)}{_way_on(job, is_read=situation.is_read)}"
    if job.state is JobState.CANCELLED:
        return f"job {job.public_id} was cancelled; `batchmill results {job.public_id}` has what was answered before"
    if job.state is JobState.FAILED:
        return f"job {job.public_id} could not be loaded: {job.reason or 'see its log'}"
    if not situation.is_read:
        return f"job {job.public_id} stands: nobody reads its data set any more; {_way_on(job)}"
    return None


def how_to_serve(queue: str) -> str:
    """The command that starts a worker for this queue."""
    wing, _, name = queue.partition(".")
    return f"batchmill worker gpu --model {name}" if wing == "gpu" else f"batchmill worker api --accounts {name}"


def start_a_worker(_: Situation, queue: str) -> str:
    """The remedy with a configured broker: workers are started by hand, here or on another host."""
    return f"start one: {how_to_serve(queue)}"


def resume_here(situation: Situation, _: str) -> str:
    """The remedy in an embedded folder: resuming starts what the job needs."""
    return f"start one: batchmill resume {situation.report.job.public_id}"


def wait_for_own(_: Situation, __: str) -> str:
    """The remedy while this process itself runs the workers."""
    return "it is being started (its log: .batchmill/logs)"


def nobody_serves(situation: Situation, remedy: Remedy) -> str | None:
    """The sentence about queues of this job that no live worker takes from; None when all are served."""
    return next(_unserved(situation, remedy), None)


def _stopped_accounts(situation: Situation) -> Iterator[str]:
    for queue in situation.chunks.queues:
        account = (situation.accounts or {}).get(queue.removeprefix("api."))
        if queue.startswith("api.") and account is not None and account.state == "stopped":
            yield f"account {account.name} is stopped ({account.reason}); it is probed until it works again"


def _unserved(situation: Situation, remedy: Remedy) -> Iterator[str]:
    for queue in situation.unserved():
        unfit = _unfit(situation.unfit, queue)
        yield f"no live worker serves queue {queue}{unfit}; {remedy(situation, queue)}"


def _unfit(workers: Sequence[WorkerRecord], queue: str) -> str:
    reasons = [w.reason for w in workers if queue in w.queues and w.reason]
    return f" (the last one could not start: {reasons[-1].rstrip('.')})" if reasons else ""


def _busy_workers(situation: Situation) -> Iterator[str]:
    mine = set(situation.chunks.queues)
    for worker in situation.workers:
        if mine.isdisjoint(worker.queues):
            continue
        if worker.state == STARTING:
            yield f"worker {worker.name} is starting"
        elif worker.throttled:
            yield worker.throttled


def _due_later(situation: Situation, now_ms: int) -> Iterator[str]:
    due = situation.chunks.next_due_ms
    leased = situation.chunks.by_state.get(ChunkState.LEASED, 0)
    if due is not None and not leased and not situation.in_flight:
        yield f"the next retry is due in {max(0, due - now_ms) / 1000:.0f} s"


def _clause(reason: str | None) -> str:
    return f"{reason.rstrip('.;')}; " if reason else ""


def _way_on(job: JobRecord, *, is_read: bool = True) -> str:
    resume = f"`batchmill resume {job.public_id}`"
    again = "run the command that began it again"
    ways = {
        "source": f"{again} with --key {job.key}: it goes on after row {job.n_rows:,}",
        "budget": f"raise it and go on: `batchmill resume {job.public_id} --budget USD`",
        "account": f"set the account right, then {resume}",
        "unknown_model": f"once the provider has it, {resume}; else correct the model in batchmill.toml and submit anew",
    }
    if job.state is not JobState.PAUSED:
        return (
            f"{again} with --key {job.key}"
            if job.key is not None
            else f"{again}, and `batchmill cancel {job.public_id}`"
        )
    return ways.get((job.reason_kind or "") if is_read else "source", f"go on with {resume}")
