"""Turns a data set into a job: reads, renders and saves every row, then opens the job and rings for its first chunks.

A job is `loading` until the whole data set is read and valid, so that a bad line near the end refuses it as a whole; an
eager one is opened with its first rows, and is paused when its source fails later. With a key, a loader that died is gone
on with: the rows that are saved already are compared by the digest of their content.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from batchmill_core.errors import BatchmillError, JobError, JobStopped, PromptError, SourceError
from batchmill_core.job import JobState
from batchmill_core.settings import Settings
from batchmill_db import jobs, loading, rounds
from batchmill_db.doorbells import Doorbell
from batchmill_db.jobs import JobRecord, NewJob
from batchmill_db.session import Connection, Database, DatabaseError

from .beating import beating, holder
from .chunking import PackedRow, default_chunk_size, pack_row
from .eager import load_eagerly
from .loader import Loader, NotLoading
from .prepare import Prepared, check_budget, make_step, prepare
from .saved_rows import OtherData, SavedRows, named
from .source_files import job_name, print_of
from .submission import Submission

__all__ = ["Prepared", "Submission", "check_budget", "make_step", "prepare", "submit"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Who is told what while a data set is read; see `submit`."""

    ring: Callable[[Doorbell], None] | None = None
    progress: Callable[[int], None] | None = None
    opened: Callable[[JobRecord], None] | None = None


def submit(
    database: Database,
    settings: Settings,
    submission: Submission,
    *,
    ring: Callable[[Doorbell], None] | None = None,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
    opened: Callable[[JobRecord], None] | None = None,
    prepared: Prepared | None = None,
) -> JobRecord:
    """Saves the whole data set as a job and opens it; answers the job.

    ``ring`` publishes a chunk to the broker; what it cannot publish the dispatcher does. ``progress`` is told how many
    rows are saved, ``note`` what the user should know though nothing is wrong, ``opened`` of the job once workers may
    begin with it: at the end, or with the first rows of an eager submission, and then by another thread. ``prepared`` is what `prepare` made of this submission,
    for callers that start something only when it is well.

    With a key this is idempotent: the same submission answers the job that is there, a loader that died is gone on with.
    Raises SourceError, PromptError or ConfigurationError when the data set or what is asked is wrong: no job is left
    then. JobStopped when that shows only after an eager job was opened: it is paused, and the same key goes on. JobError
    when the key belongs to another submission or to another data set.
    """
    told = Told(ring=ring, progress=progress, opened=opened)
    known = _known(database, submission)
    if known is not None and not _is_unread(known):
        _check_same_data(database, submission, known, lambda: prepared or prepare(submission, settings))
        return known
    prepared = prepared or prepare(submission, settings)
    for sentence in prepared.notes:
        if note is not None:
            note(sentence)
    try:
        job, size = _begin(database, submission, prepared, known)
    except DatabaseError:
        known = _known(database, submission)
        if known is None:
            raise
        if not _is_unread(known):
            return known
        job, size = _begin(database, submission, prepared, known)  # another submitter of this key came first
    return _read(database, job, prepared, size, submission, told)


def _is_unread(job: JobRecord) -> bool:
    """Whether the same key goes on reading: no job that was cancelled is."""
    return not job.loaded and job.state is not JobState.CANCELLED


def _known(database: Database, submission: Submission) -> JobRecord | None:
    """The job of the same key. Raises JobError when it was submitted with other options."""
    if submission.key is None:
        return None
    with database.reading() as conn:
        known = jobs.by_key(conn, submission.key)
    if known is None or known.state is JobState.FAILED:
        return known
    asked, before = submission.identity(), dict(known.submission.get("identity", {}))
    if not known.loaded:  # its rows so far were good; how the next bad one is met may be said anew
        before["skip_bad_rows"] = asked["skip_bad_rows"]
    changed = sorted(k for k in asked if asked[k] != before.get(k))
    if changed:
        raise JobError(
            f"key {submission.key!r} belongs to job {known.public_id}, which was submitted with another "
            f"{', '.join(changed)}; use another key, or the same options"
        )
    return known


def _check_same_data(
    database: Database, submission: Submission, known: JobRecord, prepared: Callable[[], Prepared]
) -> None:
    """Raises OtherData when the data set is not the one that the job was made of. Files not touched since are."""
    files = print_of(submission.dataset)
    if not known.loaded or (files is not None and files == known.submission.get("files")):
        return
    with database.reading() as conn:
        saved = SavedRows(loading.saved_from(conn, known.id, 0), job=named(known))
    waiting: list[PackedRow] = []
    met = 0
    for row in _packed(prepared()):
        if not saved:
            raise saved.more(met)
        waiting.append(row)
        met += saved.meet(waiting)
    saved.end(met + len(waiting))


def _packed(prepared: Prepared) -> Iterator[PackedRow]:
    return (pack_row(row, request) for row, request in prepared.requests())


def _begin(
    database: Database, submission: Submission, prepared: Prepared, known: JobRecord | None
) -> tuple[JobRecord, int]:
    """The job to load into, and its chunk size. One that is gone on with keeps the size that it began with."""
    size = submission.chunk_size or default_chunk_size(prepared.entry, prepared.account)
    if known is not None and known.state is not JobState.FAILED:
        size = int(known.submission["chunk_size"])
    new = NewJob(
        name=submission.name or _default_name(submission),
        model=prepared.entry.name,
        spec=prepared.spec,
        source=prepared.source.name,
        key=submission.key,
        priority=submission.priority,
        budget_nanousd=submission.budget_nanousd,
        submission={
            "identity": submission.identity(),
            "chunk_size": size,
            "files": print_of(submission.dataset),
        },
    )
    began = database.run(lambda conn: _begun(conn, known, new, eager=submission.eager), waits_for_space=False)
    return began, size


def _begun(conn: Connection, known: JobRecord | None, new: NewJob, *, eager: bool) -> JobRecord:
    loading.sweep(conn)
    if known is None:
        job_id = jobs.create(conn, new)
    else:
        job_id = known.id
        jobs.reload(conn, job_id)
        if known.state in (JobState.OPEN, JobState.PAUSED):
            loading.go_on(conn, job_id, new)
        else:
            jobs.renew(conn, job_id, new)
    if eager:
        loading.set_key(conn, job_id)
    loading.beat(conn, job_id, holder())
    return jobs.get(conn, job_id)


def _read(
    database: Database, job: JobRecord, prepared: Prepared, chunk_size: int, submission: Submission, told: Told
) -> JobRecord:
    """Loads the rows; what became of the job when that fails is said by what is raised."""
    with database.reading() as conn:
        spec = rounds.spec_of(conn, job.id, 1)  # of a job that is open already, as its workers know it
    prepared = replace(prepared, spec=spec)
    loader = Loader(
        database=database,
        job=job,
        queue=spec.steps[0].queue,
        chunk_size=chunk_size,
        source=prepared.source,
        eager=submission.eager or job.state is not JobState.LOADING,
        ring=told.ring,
        progress=told.progress,
        opened=told.opened,
    )
    try:
        with beating(database, job.id):
            if loader.eager:
                load_eagerly(loader, _packed(prepared))
            else:
                loader.load(_packed(prepared))
    except NotLoading:
        return _ended_elsewhere(database, job)
    except BaseException as fault:
        _fail(database, loader, fault, keyed=submission.key is not None)
        raise
    with database.reading() as conn:
        return jobs.get(conn, job.id)


def _ended_elsewhere(database: Database, job: JobRecord) -> JobRecord:
    with database.reading() as conn:
        try:
            now = jobs.get(conn, job.id)
        except JobError:
            raise JobError(f"{named(job)} was refused by another process that read its data set too") from None
    if now.state in (JobState.CANCELLED, JobState.FAILED):
        raise JobError(f"job {now.public_id} was {now.state} while its data set was being read: {now.reason}")
    return now


def _fail(database: Database, loader: Loader, fault: BaseException, *, keyed: bool) -> None:
    """What becomes of a job that could not be read to its end. Raises JobStopped for one that was opened before."""
    job, refused = loader.job, isinstance(fault, (SourceError, PromptError))
    # One that is gone on with may be open before a row is saved; other data than its own is no fault of it.
    opened = loader.is_open or (job.state is not JobState.LOADING and not isinstance(fault, OtherData))
    interrupted = isinstance(fault, KeyboardInterrupt)
    reason = "interrupted while its data set was read" if interrupted else str(fault) or repr(fault)
    try:
        if opened:
            database.run(lambda conn: loading.stop(conn, job.id, reason), waits_for_space=False)
        elif job.state is JobState.LOADING and (refused or not keyed):
            database.run(lambda conn: loading.drop(conn, job.id), waits_for_space=False)
        else:
            database.run(lambda conn: loading.leave(conn, job.id), waits_for_space=False)
    except DatabaseError as second:  # the fault that came first is what is told
        _give_up(database, job, second)
        return
    if opened and isinstance(fault, BatchmillError) and not isinstance(fault, (DatabaseError, OtherData)):
        _stopped(job, loader, fault)


def _give_up(database: Database, job: JobRecord, fault: DatabaseError) -> None:
    """A full disk may have no room to drop a job, but for the word that nobody reads it: then others drop it later."""
    with suppress(DatabaseError):
        database.run(lambda conn: loading.give_up(conn, job.id), waits_for_space=False)
    log.info("job_left_half_read job=%s error=%s", job.public_id, fault)


def _stopped(job: JobRecord, loader: Loader, fault: BatchmillError) -> NoReturn:
    raise JobStopped(
        f"job {job.public_id} is paused after {loader.n_rows:,} rows of its data set: {str(fault).rstrip('.')}; then "
        f"run the same command with the key {job.key}: it goes on from there"
    ) from fault


def _default_name(submission: Submission) -> str:
    if isinstance(submission.dataset, (str, Path)) and str(submission.dataset) != "-":
        return job_name(submission.dataset)
    return f"job-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
