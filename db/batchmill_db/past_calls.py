"""What a row's earlier calls of a round amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from batchmill_core.errors import CallState
from batchmill_core.job import Rows
from batchmill_core.usage import Usage, split, split_usage

from .schema import TOKEN_COLUMNS, call
from .spans import among


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a row's earlier calls of this round amount to."""

    tries: int = 0
    calls: int = 0
    cost_nanousd: int | None = None
    unknown_nanousd: int | None = None
    usage: Usage | None = None


def past_of(conn: Connection, job_id: int, rows: Rows, round_number: int) -> dict[int, Past]:
    """Earlier calls per row of this round that were not void: a drain or a crash resets no tries. Reads only.

    A call over many rows counts as a try for each; its cost is split evenly, the first rows taking the remainder.
    """
    counted = (
        call.c.job_id == job_id,
        call.c.round == round_number,
        call.c.state.in_((CallState.SETTLED.value, CallState.UNKNOWN.value)),
    )
    of_one_row = (select(call).where(*counted, call.c.rows.is_(None), piece) for piece in among(call.c.first_row, rows))
    of_many = select(call).where(
        *counted, call.c.rows.is_not(None), call.c.first_row <= rows.last, call.c.last_row >= rows.first
    )
    found = [line for query in (*of_one_row, of_many) for line in conn.execute(query)]
    past: dict[int, Past] = {}
    wanted = set(rows)
    for c in found:
        covered = list(Rows.parse(c.rows)) if c.rows else [c.first_row]
        _add_past(past, c, covered, wanted)
    return past


def _add_past(past: dict[int, Past], c: Any, covered: Sequence[int], wanted: set[int]) -> None:
    weights = [1] * len(covered)
    unknown = c.state == CallState.UNKNOWN.value
    amount = c.bound_nanousd if unknown else c.cost_nanousd
    amounts: Sequence[int | None] = [None] * len(covered) if amount is None else split(amount, weights)
    whole = (
        None
        if c.input_tokens is None
        else Usage(**{t.removesuffix("_tokens"): getattr(c, t) or 0 for t in TOKEN_COLUMNS})
    )
    usages: Sequence[Usage | None] = [None] * len(covered) if whole is None else split_usage(whole, weights)
    for row, money, usage in zip(covered, amounts, usages, strict=True):
        if row in wanted:
            p = past.get(row, Past())
            past[row] = Past(
                tries=p.tries + (c.error_kind != "engine_lost"),  # the chunk counts that as a crash
                calls=p.calls + 1,
                cost_nanousd=_plus(p.cost_nanousd, None if unknown else money),
                unknown_nanousd=_plus(p.unknown_nanousd, money if unknown else None),
                usage=usage if p.usage is None else (p.usage if usage is None else p.usage + usage),
            )


def _plus(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else a + b
