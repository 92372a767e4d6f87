"""Invariants between a job's ledger and a provider's bill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from batchmill_core.errors import CallState

from .jobs import JobRecord
from .schema import call


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    """One call that a provider billed. ``row`` is whose it was, where the provider's list tells; else None."""

    request_id: str
    row: int | None = None
    cost_nanousd: int | None = None


BillInvariant = Callable[[Connection, JobRecord, Sequence[BillLine]], list[str]]


def _lines(conn: Connection, job: JobRecord) -> Sequence[Any]:
    wanted = (call.c.request_id, call.c.state, call.c.cost_nanousd, call.c.first_row, call.c.last_row)
    return conn.execute(select(*wanted).where(call.c.job_id == job.id)).all()


def every_billed_call_is_in_the_ledger(conn: Connection, job: JobRecord, bill: Sequence[BillLine]) -> list[str]:
    """Each billed call is a line of the ledger: by its id, or as an open line of its row whose answer never came."""
    lines = _lines(conn, job)
    known = {r.request_id for r in lines if r.state == CallState.SETTLED}
    answerless = [r for r in lines if r.state in (CallState.UNKNOWN, CallState.RESERVED)]
    missing = []
    for b in sorted((b for b in bill if b.request_id not in known), key=lambda b: (b.row is None, b.request_id)):
        place = next((i for i, r in enumerate(answerless) if b.row is None or r.first_row <= b.row <= r.last_row), None)
        if place is None:
            missing.append(f"request_id={b.request_id} row={b.row}")
        else:
            del answerless[place]
    return missing


def no_call_is_in_the_ledger_twice(conn: Connection, job: JobRecord, bill: Sequence[BillLine]) -> list[str]:
    """No billed call has two settled lines."""
    billed = {b.request_id for b in bill}
    times = Counter(r.request_id for r in _lines(conn, job) if r.state == CallState.SETTLED and r.request_id in billed)
    return [f"request_id={request_id} lines={n}" for request_id, n in times.items() if n > 1]


def the_ledger_agrees_with_the_bill(conn: Connection, job: JobRecord, bill: Sequence[BillLine]) -> list[str]:
    """A settled line that cost something was billed, at the same price where the bill tells one."""
    billed = {b.request_id: b.cost_nanousd for b in bill}
    wrong = []
    for r in _lines(conn, job):
        if r.state != CallState.SETTLED or not r.cost_nanousd or r.request_id is None:
            continue
        price = billed.get(r.request_id, -1)
        if price is not None and price != r.cost_nanousd:
            said = "not at all" if price == -1 else price
            wrong.append(f"request_id={r.request_id} cost_nanousd={r.cost_nanousd} billed={said}")
    return wrong


INVARIANTS: tuple[BillInvariant, ...] = (
    every_billed_call_is_in_the_ledger,
    no_call_is_in_the_ledger_twice,
    the_ledger_agrees_with_the_bill,
)
