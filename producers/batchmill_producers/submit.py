"""Turns a data set into a job: reads, renders and saves every row, then opens the job and rings for its first chunks.

A job is `loading` until the whole data set is read and valid, so that a bad line near the end refuses it as a whole. With
a key, a loader that died is gone on with: the rows that are saved already are compared by the digest of their content.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.errors import ConfigurationError, JobError, PromptError, SourceError
from batchmill_core.job import JobState, Rows, Spec, Step
from batchmill_core.prices import price_for
from batchmill_core.request import Request, Row, TaskKind
from batchmill_core.settings import Settings
from batchmill_db import chunks, jobs
from batchmill_db.chunks import Doorbell, NewChunk
from batchmill_db.jobs import JobRecord, NewJob
from batchmill_db.session import Connection, Database, DatabaseError

from .answer_schema import check_schema
from .chunking import PackedRow, Payload, default_chunk_size, pack_payload, pack_row, size_chunks
from .params import check_params, doubts
from .prompts import Prompt, compile_prompt
from .source_files import job_name
from .sources import Source, open_source

log = logging.getLogger(__name__)

_ROWS_PER_TRANSACTION = 8000
_BYTES_PER_TRANSACTION = 16_000_000
_FIRST_RINGS = 8
_RING_AGAIN_MS = 15_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What somebody wants done. ``dataset`` is what `open_source` takes; ``model`` None takes the data set's own."""

    dataset: Any
    model: str | None = None
    prompt: str | None = None
    system: str | None = None
    messages_column: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    task: TaskKind | None = None
    name: str | None = None
    key: str | None = None
    budget_nanousd: int | None = None
    priority: int = 5
    chunk_size: int | None = None
    id_column: str | None = None
    limit: int | None = None
    encoding: str = "utf-8"
    skip_bad_rows: bool = False
    stream: bool = False

    def identity(self) -> dict[str, Any]:
        """What must be the same for the same key: all that changes what is asked, but neither data nor name."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "system": self.system,
            "messages_column": self.messages_column,
            "params": dict(self.params),
            "schema": self.schema,
            "task": None if self.task is None else self.task.value,
            "id_column": self.id_column,
            "limit": self.limit,
            "encoding": self.encoding,
            "skip_bad_rows": self.skip_bad_rows,
            "stream": self.stream,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A submission checked against the catalogue and the first row, ready to be read."""

    source: Source
    prompt: Prompt
    spec: Spec
    entry: ModelEntry
    account: Account | None
    notes: tuple[str, ...] = ()  # what the user should know, though nothing is wrong

    def requests(self) -> Iterator[tuple[Row, Request]]:
        """Each accepted row with its request, numbered without gaps; rows that cannot be rendered are bad rows."""
        index = 0
        for row in self.source:
            try:
                request = self.prompt.render(row)
                if request.task is not self.spec.task:
                    raise PromptError(
                        f"asks for {request.task.value}, unlike the rows before it ({self.spec.task.value})"
                    )
            except PromptError as fault:
                if not self.source.skips_bad_rows:
                    raise
                self.source.reject(row.line, str(fault))
                continue
            yield (row if row.index == index else replace(row, index=index)), request
            index += 1
        if index == 0:
            raise SourceError("no rows are left: every row was bad")


def prepare(submission: Submission, settings: Settings) -> Prepared:
    """Checks everything that can be checked before rows are read. Raises a UserError that says what to do."""
    source = open_source(
        submission.dataset,
        encoding=submission.encoding,
        limit=submission.limit,
        skip_bad_rows=submission.skip_bad_rows,
        id_column=submission.id_column,
    )
    own_task = source.task
    task = submission.task or own_task or TaskKind.CHAT
    if task is TaskKind.CLASSIFY:
        raise ConfigurationError(
            "task classify needs an engine that classifies; none is installed. Use chat with --schema"
        )
    if own_task is not None and submission.task not in (None, own_task):
        raise ConfigurationError(f"the data set is an OpenAI batch file of {own_task.value} requests; leave --task out")
    notes = list(doubts(submission.params))
    if own_task is not None and (submission.prompt is not None or submission.system is not None):
        notes.append("the data set is an OpenAI batch file: its rows are requests already, so the prompt is ignored")
    entry = settings.catalog.model(submission.model or _own_model(source))
    account = None if entry.account is None else settings.catalog.account(entry.account)
    prompt = compile_prompt(
        None if own_task is not None else submission.prompt,
        system=None if own_task is not None else submission.system,
        messages_column=submission.messages_column,
        columns=source.columns,
        task=task,
    )
    check_params(submission.params)
    _check_schema(submission.schema, task)
    step = make_step(entry, account)
    spec = Spec(
        task=task, steps=(step,), params=dict(submission.params), schema=submission.schema, stream=submission.stream
    )
    if submission.budget_nanousd is not None:
        check_budget(spec)
    return Prepared(source=source, prompt=prompt, spec=spec, entry=entry, account=account, notes=tuple(notes))


def make_step(entry: ModelEntry, account: Account | None) -> Step:
    """Freezes what a worker has to know of a model; the account's address and key stay with the workers."""
    retries = entry.max_retries if entry.max_retries is not None else (5 if account is None else account.max_retries)
    timeout_s = entry.timeout_s if entry.timeout_s is not None else (600.0 if account is None else account.timeout_s)
    return Step(
        model=entry.name,
        upstream=entry.upstream,
        queue=entry.queue,
        account=entry.account,
        engine=entry.engine,
        price=price_for(account, entry),
        device_nanousd_per_hour=entry.device_nanousd_per_hour,
        max_retries=retries,
        timeout_s=timeout_s,
    )


def check_budget(spec: Spec) -> None:
    """Raises ConfigurationError unless every call's cost can be bounded before it is sent."""
    for step in spec.steps:
        if not step.has_price:
            raise ConfigurationError(
                f"a budget needs a known price, and model {step.model!r} has none; add price = {{ input = …, output = … }} "
                f'under [models."{step.model}"] in batchmill.toml'
            )
    bounded = spec.task is TaskKind.EMBED or {"max_tokens", "max_completion_tokens"} & spec.params.keys()
    if not bounded and spec.steps[0].price is not None:
        raise ConfigurationError("a budget needs an explicit bound of the answer's length: add --param max_tokens=N")


def submit(
    database: Database,
    settings: Settings,
    submission: Submission,
    *,
    ring: Callable[[Doorbell], None] | None = None,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> JobRecord:
    """Saves the whole data set as a job and opens it; answers the job.

    ``ring`` publishes a chunk to the broker; what it cannot publish the dispatcher does. ``progress`` is told how many
    rows are saved, ``note`` what the user should know though nothing is wrong. With a key this is idempotent: the same submission answers the job that is there, a loader that died
    is gone on with. Raises SourceError, PromptError or ConfigurationError when the data set or what is asked is wrong (the
    job is then `failed` as a whole), JobError when the key belongs to another submission.
    """
    known = None if submission.key is None else _known(database, submission)
    if known is not None and known.state not in (JobState.LOADING, JobState.FAILED):
        return known
    prepared = prepare(submission, settings)
    for sentence in prepared.notes:
        if note is not None:
            note(sentence)
    try:
        job_id, chunk_size = _begin(database, submission, prepared, known)
    except DatabaseError:
        known = None if submission.key is None else _known(database, submission)
        if known is None:
            raise
        if known.state not in (JobState.LOADING, JobState.FAILED):
            return known
        job_id, chunk_size = _begin(database, submission, prepared, known)  # another submitter of this key came first
    try:
        _load(database, job_id, prepared, chunk_size, submission.priority, progress)
    except _NotLoading:
        return _ended_elsewhere(database, job_id)
    except BaseException as fault:
        if submission.key is None or isinstance(fault, (SourceError, PromptError)):
            _fail(database, job_id, fault)
        raise
    database.run(lambda conn: jobs.mark_loaded(conn, job_id))
    if ring is not None:
        ring_first(database, prepared.spec.steps[0].queue, ring)
    with database.reading() as conn:
        return jobs.get(conn, job_id)


class _NotLoading(Exception):
    """The job left `loading` while this loader was at it: another one finished it, or the user cancelled it."""


def _ended_elsewhere(database: Database, job_id: int) -> JobRecord:
    with database.reading() as conn:
        job = jobs.get(conn, job_id)
    if job.state in (JobState.CANCELLED, JobState.FAILED):
        raise JobError(f"job {job.public_id} was {job.state} while its data set was being read: {job.reason}")
    return job


def _fail(database: Database, job_id: int, fault: BaseException) -> None:
    """The job is refused as a whole, so that no half of it stays behind."""
    reason = str(fault) or ("interrupted while loading" if isinstance(fault, KeyboardInterrupt) else repr(fault))
    try:
        database.run(lambda conn: jobs.fail_loading(conn, job_id, reason))
    except DatabaseError as second:
        log.warning("loading_not_ended job=%d error=%s", job_id, second)  # the fault that came first is what is told


def ring_first(database: Database, queue: str, ring: Callable[[Doorbell], None]) -> None:
    """Rings for the first chunks of a queue, so that an idle worker starts before the dispatcher's next tick."""
    windows = {queue: _FIRST_RINGS}
    for bell in database.run(lambda conn: chunks.ring(conn, windows=windows, again_after_ms=_RING_AGAIN_MS)):
        ring(bell)


def _known(database: Database, submission: Submission) -> JobRecord | None:
    key = submission.key or ""
    with database.reading() as conn:
        known = jobs.by_key(conn, key)
    if known is None or known.state is JobState.FAILED:
        return known
    asked, before = submission.identity(), dict(known.submission.get("identity", {}))
    changed = sorted(k for k in asked if asked[k] != before.get(k))
    if changed:
        raise JobError(
            f"key {key!r} belongs to job {known.public_id}, which was submitted with another {', '.join(changed)}; "
            "use another key, or the same options"
        )
    return known


def _begin(database: Database, submission: Submission, prepared: Prepared, known: JobRecord | None) -> tuple[int, int]:
    """The job to load into, and its chunk size. One that is gone on with keeps the size that it began with."""
    size = submission.chunk_size or default_chunk_size(prepared.entry, prepared.account)
    if known is not None and known.state is JobState.LOADING:
        size = int(known.submission["chunk_size"])
    new = NewJob(
        name=submission.name or _default_name(submission),
        model=prepared.entry.name,
        spec=prepared.spec,
        source=prepared.source.name,
        key=submission.key,
        priority=submission.priority,
        budget_nanousd=submission.budget_nanousd,
        submission={"identity": submission.identity(), "chunk_size": size},
    )
    if known is None:
        return database.run(lambda conn: jobs.create(conn, new)), size
    database.run(lambda conn: _begin_again(conn, known.id, new))
    return known.id, size


def _begin_again(conn: Connection, job_id: int, new: NewJob) -> None:
    jobs.reload(conn, job_id)
    jobs.renew(conn, job_id, new)


def _load(
    database: Database,
    job_id: int,
    prepared: Prepared,
    chunk_size: int,
    priority: int,
    progress: Callable[[int], None] | None,
) -> None:
    loaded = _loaded(database, job_id)
    queue = prepared.spec.steps[0].queue
    packed = (pack_row(row, request) for row, request in prepared.requests())
    n_rows = 0
    for batch in _batches(size_chunks(packed, rows_per_chunk=chunk_size)):
        payloads = []
        for group in batch:
            payload = pack_payload(n_rows, group)
            n_rows += payload.n_rows
            if not _is_loaded(payload, next(loaded, None)):
                payloads.append(payload)
        if payloads:
            database.run(_saver(job_id, payloads, n_rows, queue, priority, prepared.source))
        if progress is not None:
            progress(n_rows)
    if (left := next(loaded, None)) is not None:
        raise _other_data(left[0], "are missing now")
    database.run(lambda conn: _note(conn, job_id, n_rows, prepared.source))


def _loaded(database: Database, job_id: int) -> Iterator[tuple[int, int, str]]:
    with database.reading() as conn:
        return iter(list(jobs.payload_digests(conn, job_id)))


def _is_loaded(payload: Payload, saved: tuple[int, int, str] | None) -> bool:
    if saved is None:
        return False
    if saved != (payload.first_row, payload.n_rows, payload.digest):
        raise _other_data(payload.first_row, "differ")
    return True


def _other_data(first_row: int, how: str) -> JobError:
    """Not a fault of the data set: the job that began stays, so that the right one can still be given."""
    return JobError(
        f"the data set is not the one that this key began with: rows from {first_row} on {how}; "
        "use another key, or give the same data set"
    )


def _batches(groups: Iterable[list[PackedRow]]) -> Iterator[list[list[PackedRow]]]:
    """Groups that are saved in one transaction."""
    batch: list[list[PackedRow]] = []
    rows = size = 0
    for group in groups:
        batch.append(group)
        rows += len(group)
        size += sum(r.n_bytes for r in group)
        if rows >= _ROWS_PER_TRANSACTION or size >= _BYTES_PER_TRANSACTION:
            yield batch
            batch, rows, size = [], 0, 0
    if batch:
        yield batch


def _saver(
    job_id: int, payloads: Sequence[Payload], n_rows: int, queue: str, priority: int, source: Source
) -> Callable[[Connection], None]:
    return lambda conn: _save(conn, job_id, payloads, n_rows, queue, priority, source)


def _save(
    conn: Connection, job_id: int, payloads: Sequence[Payload], n_rows: int, queue: str, priority: int, source: Source
) -> None:
    """Payloads and their chunks in one transaction. Idempotent: payloads that are there already are left alone."""
    if jobs.lock_state(conn, job_id) is not JobState.LOADING:
        raise _NotLoading
    new = jobs.add_payloads(conn, job_id, [(p.first_row, p.n_rows, p.requests, p.inputs, p.digest) for p in payloads])
    if len(new) < len(payloads):  # another loader of the same key is at it too, or a commit's answer was lost
        _check_same(conn, job_id, [p for p in payloads if p.first_row not in new])
    rows = (Rows.span(p.first_row, p.n_rows) for p in payloads if p.first_row in new)
    chunks.add(conn, job_id, (NewChunk(rows=r, queue=queue, priority=priority) for r in rows))
    _note(conn, job_id, n_rows, source)


def _check_same(conn: Connection, job_id: int, payloads: Sequence[Payload]) -> None:
    saved = {first: (first, n_rows, digest) for first, n_rows, digest in jobs.payload_digests(conn, job_id)}
    for payload in payloads:
        _is_loaded(payload, saved.get(payload.first_row))


def _note(conn: Connection, job_id: int, n_rows: int, source: Source) -> None:
    skipped = [asdict(b) for b in itertools.islice(source.bad_rows, 1000)]
    jobs.set_progress(
        conn, job_id, n_rows=n_rows, n_skipped=source.bad_row_count, skipped=skipped, columns=list(source.first_input)
    )


def _own_model(source: Source) -> str:
    """The model that the rows of an OpenAI batch file name."""
    body = source.first_input.get("body", {})
    model = body.get("model") if isinstance(body, Mapping) else None
    if not isinstance(model, str):
        raise ConfigurationError("no model is given; add --model NAME (a model of batchmill.toml)")
    return model


def _check_schema(schema: Mapping[str, Any] | None, task: TaskKind) -> None:
    if schema is None:
        return
    if task is TaskKind.EMBED:
        raise ConfigurationError("an embedding has no schema; leave --schema out")
    check_schema(schema)


def _default_name(submission: Submission) -> str:
    if isinstance(submission.dataset, (str, Path)) and str(submission.dataset) != "-":
        return job_name(submission.dataset)
    return f"job-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
