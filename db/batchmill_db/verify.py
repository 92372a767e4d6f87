"""The invariants of a job's data, checked in SQL: what `batchmill doctor --verify JOB` looks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from . import jobs, verify_bill, verify_ledger, verify_rows
from .jobs import JobRecord
from .verify_bill import BillLine

__all__ = ["BILL_INVARIANTS", "INVARIANTS", "BillLine", "Violation", "as_lines", "verify"]

Invariant = Callable[[Connection, JobRecord], list[str]]

INVARIANTS: Mapping[str, Invariant] = {f.__name__: f for f in (*verify_rows.INVARIANTS, *verify_ledger.INVARIANTS)}
BILL_INVARIANTS: Mapping[str, verify_bill.BillInvariant] = {f.__name__: f for f in verify_bill.INVARIANTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One invariant that does not hold: its name, what it says and how often it is broken, and one case."""

    name: str
    detail: str
    example: str


def verify(conn: Connection, job_id: int, *, bill: Sequence[BillLine] | None = None) -> list[Violation]:
    """The invariants that a job's data breaks; none of them may be broken at any moment, in any state of the job.

    With ``bill``, a provider's whole list of billed calls for this job, the ledger is held against it too. Reads only;
    wants one transaction with one view of the data (see `Database.reading`; on PostgreSQL best when nothing runs).
    Raises JobError when there is no such job.
    """
    job = jobs.get(conn, job_id)
    found = [(f, f(conn, job)) for f in INVARIANTS.values()]
    violations = [_violation(f.__name__, f.__doc__, cases) for f, cases in found if cases]
    if bill is not None:
        billed = [(f, f(conn, job, bill)) for f in BILL_INVARIANTS.values()]
        violations += [_violation(f.__name__, f.__doc__, cases) for f, cases in billed if cases]
    return violations


def _violation(name: str, doc: str | None, cases: Sequence[str]) -> Violation:
    sentence = (doc or name).strip().splitlines()[0].rstrip(".")
    more = "once" if len(cases) == 1 else f"{len(cases)} times, or more"
    return Violation(name=name, detail=f"broken {more}: {sentence}", example=cases[0])


def as_lines(violations: Iterable[Violation]) -> list[str]:
    """One line of text per violation, for people."""
    return [f"{v.name}: {v.detail} ({v.example})" for v in violations]
