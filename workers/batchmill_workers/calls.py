"""What a unit of rows is as a request to its engine, as a line of the ledger, and what it can cost at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill_core import tokens
from batchmill_core.job import Rows, Spec, Step
from batchmill_core.request import Request, TaskKind
from batchmill_core.usage import upper_bound
from batchmill_db.booking import NewCall
from batchmill_db.chunks import Claim

from .unit import Unit

_NS_PER_HOUR = 3_600_000_000_000


def request_of(unit: Unit, spec: Spec, step: Step) -> Request:
    """One request for all rows of the unit; several of them are embedded together."""
    first = unit.items[0].request
    params = {**spec.params, **first.params} if first.params else spec.params
    inputs = first.inputs if len(unit.items) == 1 else tuple(t for i in unit.items for t in i.request.inputs)
    return Request(
        task=spec.task,
        messages=first.messages,
        inputs=inputs,
        params=params,
        model=step.upstream,
        schema=spec.schema,
        stream=spec.stream,
    )


def new_call(unit: Unit, claim: Claim, step: Step, *, worker: str) -> NewCall:
    """The line of the ledger that books the unit's next call, ``unit.seq`` within ``unit.bound_nanousd``."""
    return NewCall(
        chunk_id=claim.chunk_id,
        fence=claim.fence,
        seq=unit.seq,
        job_id=claim.job_id,
        round=claim.round,
        rows=Rows.of(i.row for i in unit.items) if len(unit.items) > 1 else Rows.span(unit.items[0].row, 1),
        model=step.model,
        worker=worker,
        account=step.account,
        bound_nanousd=unit.bound_nanousd,
        price_version=None if step.price is None else step.price.version,
    )


def bound_of(unit: Unit, spec: Spec, step: Step, *, side_by_side: int) -> int | None:
    """The most in nano-USD that the unit's next call can cost; None without a price or without max_tokens.

    On a device it is the rows' share of ``timeout_s`` seconds of it, ``side_by_side`` rows being computed together.
    Bounds by the whole of them would let a budget of an hour's cost keep six rows on the device. So a row that runs
    alone for longer than its share can cost more than was held for it, which the next booking then sees.
    """
    if step.price is None:
        if step.device_nanousd_per_hour is None:
            return None
        device_ns = int(step.timeout_s * 1e9) * min(side_by_side, len(unit.items))
        return -(-device_ns * step.device_nanousd_per_hour // (_NS_PER_HOUR * side_by_side))
    output = output_bound({**spec.params, **unit.items[0].request.params}) if spec.task is TaskKind.CHAT else 0
    if output is None:
        return None
    prompt = sum(tokens.upper_bound_tokens(i.request) for i in unit.items)
    return upper_bound(step.price, input_tokens=prompt, output_tokens=output)


def output_bound(params: Mapping[str, Any]) -> int | None:
    """The most tokens that an answer can have, over all choices; None when nothing bounds it."""
    most = params.get("max_completion_tokens", params.get("max_tokens"))
    if not isinstance(most, int):
        return None
    choices = params.get("n", 1)
    return most * (choices if isinstance(choices, int) and choices > 0 else 1)
