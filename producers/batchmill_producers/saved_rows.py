"""The rows of a job that are saved already, as a data set that is read once more meets them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from batchmill_core.errors import JobError
from batchmill_db.jobs import JobRecord

from .chunking import PackedRow, digest_of


class OtherData(JobError):
    """The data set is not the one that the job began with. The job stays, so that the right one can still be given."""


def named(job: JobRecord) -> str:
    """A job with its key and, since rows carry their file's name, what it was read from."""
    read = "" if job.source is None else f" ({job.source})"
    return f"job {job.public_id} of key {job.key!r}{read}"


class SavedRows:
    """Payloads in row order, as (first row, rows, digest). Holds no content: rows are compared by their digest."""

    def __init__(self, payloads: Iterable[tuple[int, int, str]], *, job: str) -> None:
        self._payloads = deque(payloads)
        self._job = job

    def __bool__(self) -> bool:
        return bool(self._payloads)

    def found(self, payloads: Iterable[tuple[int, int, str]]) -> None:
        """More payloads, that another loader of the same job saved."""
        self._payloads.extend(payloads)

    def meet(self, rows: list[PackedRow]) -> int:
        """Takes from the front of ``rows`` what is saved and answers how many those were. Raises OtherData."""
        met = 0
        while self._payloads and len(rows) - met >= self._payloads[0][1]:
            first, count, digest = self._payloads.popleft()
            if digest_of(rows[met : met + count]) != digest:
                last = first + count - 1
                which = (
                    f"row {first:,} (counted from 0) differs"
                    if count == 1
                    else f"some of rows {first:,} to {last:,} differ"
                )
                raise self._other(which)
            met += count
        del rows[:met]
        return met

    def end(self, n_rows: int) -> None:
        """The data set has ended after ``n_rows`` rows. Raises OtherData when the job has more."""
        if self._payloads:
            raise self._other(f"it ends after {n_rows:,} rows, and more were read before")

    def more(self, n_rows: int) -> OtherData:
        """What is wrong with a data set that goes on where all rows of a job are met."""
        return self._other(f"it has more than the {n_rows:,} rows that were read before")

    def _other(self, how: str) -> OtherData:
        return OtherData(
            f"the data set is not the one that {self._job} began with: {how}; "
            "use another key, or give the same data set"
        )
