"""Rows on their way, those of one call together, each with its share of what its calls came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchmill_core.errors import CallState
from batchmill_core.request import Request, RowStatus
from batchmill_core.usage import Usage, split, split_usage
from batchmill_db.ledger import CallEnd


@dataclass(slots=True)
class Item:
    """One row on its way, with what its earlier calls of this round came to."""

    row: int
    request: Request
    weight: int = 1  # its part of a call that covers several rows
    sanitized: bool = False
    replaces: RowStatus | None = None
    calls: int = 0
    cost_nanousd: int | None = None
    unknown_nanousd: int | None = None
    usage: Usage | None = None
    seqs: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Unit:
    """The rows of one call. ``seq`` is the booked call that is to be sent next, ``bound_nanousd`` the most it can cost."""

    items: list[Item]
    tries: int = 0
    waits: int = 0
    seq: int = 0
    bound_nanousd: int | None = None
    sending: bool = False

    @property
    def rows(self) -> list[int]:
        return [i.row for i in self.items]


def share(unit: Unit, end: CallEnd) -> None:
    """Gives each row its part of a call that was not void."""
    if end.state is CallState.VOID:
        return
    count = len(unit.items)
    if count == 1:
        _add(unit.items[0], end.seq, end.usage, end.cost_nanousd, _unknown_of(end))
        return
    weights = [i.weight for i in unit.items]
    usages: Sequence[Usage | None] = [None] * count if end.usage is None else split_usage(end.usage, weights)
    costs: Sequence[int | None] = [None] * count if end.cost_nanousd is None else split(end.cost_nanousd, weights)
    bound = _unknown_of(end)
    bounds: Sequence[int | None] = [None] * count if bound is None else split(bound, weights)
    for item, usage, money, unknown in zip(unit.items, usages, costs, bounds, strict=True):
        _add(item, end.seq, usage, money, unknown)


def _unknown_of(end: CallEnd) -> int | None:
    return end.bound_nanousd if end.state is CallState.UNKNOWN else None


def _add(item: Item, seq: int, usage: Usage | None, money: int | None, unknown: int | None) -> None:
    item.calls += 1
    item.seqs.append(seq)
    if usage is not None:
        item.usage = usage if item.usage is None else item.usage + usage
    if money is not None:
        item.cost_nanousd = money + (item.cost_nanousd or 0)
    if unknown is not None:
        item.unknown_nanousd = unknown + (item.unknown_nanousd or 0)
