"""What was spent, summed over the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, case, func, or_, select

from .schema import call, job


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Sums over the ledger. ``unknown_nanousd`` is an upper bound; ``unbounded`` counts calls without even a bound."""

    key: str = ""
    calls: int = 0
    settled_nanousd: int = 0
    unknown_nanousd: int = 0
    wasted_nanousd: int = 0
    reserved_nanousd: int = 0
    unknown_calls: int = 0
    unbounded: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0


_BY = {
    "account": func.coalesce(call.c.account, "local"),
    "model": call.c.model,
    "worker": call.c.worker,
    "job": func.coalesce(job.c.public_id, "removed"),
    "day": None,  # by dialect
}


BY = tuple(_BY)


def spending(conn: Connection, *, by: str | None = None, job_id: int | None = None) -> list[Spending]:
    """Sums of the ledger, grouped by model, job, day (UTC), account or worker. Reads only."""
    key: Any = _BY[by] if by in _BY and by != "day" else None
    if by == "day":
        key = (
            func.date(call.c.reserved_ms / 1000, "unixepoch")
            if conn.dialect.name == "sqlite"
            else func.to_char(func.to_timestamp(call.c.reserved_ms / 1000).op("AT TIME ZONE")("UTC"), "YYYY-MM-DD")
        )

    def total(condition: Any, column: Any) -> Any:
        return func.coalesce(func.sum(case((condition, column), else_=0)), 0)

    settled, unknown = call.c.state == "settled", call.c.state == "unknown"
    columns = [
        func.sum(case((call.c.state != "void", 1), else_=0)).label("calls"),
        total(settled, call.c.cost_nanousd).label("settled_nanousd"),
        total(unknown, call.c.bound_nanousd).label("unknown_nanousd"),
        total(and_(settled, call.c.wasted), call.c.cost_nanousd).label("wasted_nanousd"),
        total(call.c.state == "reserved", call.c.bound_nanousd).label("reserved_nanousd"),
        total(or_(unknown, and_(settled, call.c.cost_nanousd.is_(None))), 1).label("unknown_calls"),
        total(
            or_(and_(unknown, call.c.bound_nanousd.is_(None)), and_(settled, call.c.cost_nanousd.is_(None))), 1
        ).label("unbounded"),
        func.coalesce(func.sum(call.c.input_tokens), 0).label("input_tokens"),
        func.coalesce(func.sum(call.c.cached_input_tokens), 0).label("cached_input_tokens"),
        func.coalesce(func.sum(call.c.output_tokens), 0).label("output_tokens"),
    ]
    query = select(*columns) if key is None else select(key.label("key"), *columns).group_by(key).order_by(key)
    if by == "job":
        query = query.select_from(call.outerjoin(job, job.c.id == call.c.job_id))
    if job_id is not None:
        query = query.where(call.c.job_id == job_id)
    return [_spending(dict(r._mapping)) for r in conn.execute(query)]


def _spending(m: Mapping[Any, Any]) -> Spending:
    key = str(m.get("key", ""))
    return Spending(key=key, **{str(k): int(v or 0) for k, v in m.items() if k != "key"})
