"""Puts the rows of one data set into its job: in order, each once, many per transaction.

Any number of loaders may be at one job, and any of them may die: what is saved is met again by its digest, and where the
next rows belong is decided under the job's lock. So a loader that goes on with a job, one that another has overtaken and
one whose commit's answer was lost all do the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from batchmill_core.errors import JobError
from batchmill_core.job import JobState, Rows
from batchmill_db import chunks, doorbells, jobs, loading, payload_store, steering
from batchmill_db.chunks import NewChunk
from batchmill_db.doorbells import Doorbell
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Connection, Database

from .chunking import PackedRow, Payload, pack_payload, size_chunks
from .saved_rows import SavedRows, named
from .sources import Source

_T = TypeVar("_T")
ROWS_PER_TRANSACTION = 8000
BYTES_PER_TRANSACTION = 16_000_000
_FIRST_RINGS = 8
_RING_AGAIN_MS = 15_000


class NotLoading(Exception):
    """The job takes no more rows: another loader finished it, or the user cancelled it."""


@dataclass(kw_only=True)
class Loader:
    """One process's way of loading one job. ``opened`` is told once of a job that workers may begin with.

    ``n_rows`` counts the rows that are surely saved. Not for use by several threads at once.
    """

    database: Database
    job: JobRecord
    queue: str
    chunk_size: int
    source: Source
    eager: bool = False
    ring: Callable[[Doorbell], None] | None = None
    progress: Callable[[int], None] | None = None
    opened: Callable[[JobRecord], None] | None = None
    n_rows: int = 0
    is_open: bool = False
    _waiting: list[PackedRow] = field(default_factory=list)
    _saved: SavedRows = field(init=False)

    def __post_init__(self) -> None:
        with self.database.reading() as conn:
            found = loading.saved_from(conn, self.job.id, 0)
        self._saved = SavedRows(found, job=named(self.job))

    def load(self, rows: Iterable[PackedRow]) -> None:
        """Saves all rows. Raises what ``rows`` raises, OtherData, or NotLoading."""
        size = 0
        for row in rows:
            self._waiting.append(row)
            size += row.n_bytes
            if len(self._waiting) >= ROWS_PER_TRANSACTION or size >= BYTES_PER_TRANSACTION:
                self.save()
                size = sum(r.n_bytes for r in self._waiting)
        self.end()

    def add(self, rows: Iterable[PackedRow], *, save_all: bool) -> None:
        """Saves full chunks of what has come so far, with ``save_all`` the rows after them too."""
        self._waiting.extend(rows)
        self.save(save_all=save_all)

    def save(self, *, save_all: bool = False) -> None:
        """Saves full chunks of what is waiting, with ``save_all`` the rest too. Raises OtherData or NotLoading."""
        before = self.n_rows
        while True:
            self.n_rows += self._saved.meet(self._waiting)
            if self._saved:
                break  # more rows have to come before they can be compared
            payloads = self._payloads(save_all)
            if not payloads:
                break
            if overtaken := self._run(lambda conn, p=payloads: self._keep(conn, p)):  # type: ignore[misc]  # a default
                self._saved.found(overtaken)
                continue
            count = sum(p.n_rows for p in payloads)
            del self._waiting[:count]
            self.n_rows += count
        if self.n_rows > before:
            self._tell()

    def end(self) -> None:
        """Saves what is left and marks the job as read to its end. Raises as `save` does."""
        self.save(save_all=True)
        self._saved.end(self.n_rows + len(self._waiting))
        self._run(self._finish)
        self._open()

    def _payloads(self, save_all: bool) -> list[Payload]:
        groups = list(size_chunks(self._waiting, rows_per_chunk=self.chunk_size))
        if groups and not save_all and len(groups[-1]) < self.chunk_size:
            groups.pop()
        payloads, first = [], self.n_rows
        for group in groups:
            payloads.append(pack_payload(first, group))
            first += len(group)
        return payloads

    def _keep(self, conn: Connection, payloads: list[Payload]) -> list[tuple[int, int, str]]:
        """Payloads and their chunks in one transaction, unless rows are saved there already: then answers these."""
        now = self._locked(conn)
        if there := loading.saved_from(conn, self.job.id, payloads[0].first_row):
            return there
        if now.loaded:
            raise self._saved.more(payloads[0].first_row)
        payload_store.add_payloads(
            conn, self.job.id, [(p.first_row, p.n_rows, p.requests, p.inputs, p.digest) for p in payloads]
        )
        rows = (Rows.span(p.first_row, p.n_rows) for p in payloads)
        new = (NewChunk(rows=r, queue=self.queue, priority=self.job.priority) for r in rows)
        chunks.add(conn, self.job.id, new)
        self._note(conn, payloads[-1].first_row + payloads[-1].n_rows)
        return []

    def _locked(self, conn: Connection) -> loading.Reading:
        """How the job stands. One that another loader has finished goes through too: its rows have to be these."""
        now = loading.lock(conn, self.job.id)
        if now is None or not (now.takes_rows or (now.loaded and now.state is not JobState.CANCELLED)):
            raise NotLoading
        return now

    def _note(self, conn: Connection, n_rows: int) -> None:
        skipped = [asdict(b) for b in itertools.islice(self.source.bad_rows, 1000)]
        loading.note(
            conn,
            self.job.id,
            n_rows=n_rows,
            n_skipped=self.source.bad_row_count,
            skipped=skipped,
            columns=list(self.source.first_input),
        )

    def _finish(self, conn: Connection) -> None:
        now = self._locked(conn)
        for first, _, _ in loading.saved_from(conn, self.job.id, self.n_rows):
            raise JobError(f"another loader of job {self.job.public_id} has read more: rows from {first:,} on")
        if now.loaded:
            raise NotLoading
        self._note(conn, self.n_rows)
        loading.end(conn, self.job.id)
        steering.finish(conn)  # all rows may be answered already, and no worker be left to notice

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.n_rows)
        if self.eager:
            self._open()

    def _open(self) -> None:
        """Lets workers begin, and rings for chunks, so that an idle one does before the dispatcher's next tick."""
        if not self.is_open:
            self._run(lambda conn: loading.open_early(conn, self.job.id))
            self.is_open = True
            if self.opened is not None:
                self.opened(self._now())
        if self.ring is not None:
            ring_first(self.database, self.queue, self.ring)

    def _now(self) -> JobRecord:
        with self.database.reading() as conn:
            return jobs.get(conn, self.job.id)

    def _run(self, work: Callable[[Connection], _T]) -> _T:
        return self.database.run(work, waits_for_space=False)


def ring_first(database: Database, queue: str, ring: Callable[[Doorbell], None]) -> None:
    """Rings for the first chunks of a queue, so that an idle worker starts before the dispatcher's next tick."""
    windows = {queue: _FIRST_RINGS}
    for bell in database.run(lambda conn: doorbells.ring(conn, windows=windows, again_after_ms=_RING_AGAIN_MS)):
        ring(bell)
