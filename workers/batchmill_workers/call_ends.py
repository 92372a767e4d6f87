"""How a call ended, as the ledger takes it: its state, and what is known of its usage and cost."""

from __future__ import annotations

from batchmill_core.errors import CallError, CallState
from batchmill_core.job import Step
from batchmill_core.request import Completion
from batchmill_core.usage import Usage, cost, round_half_even
from batchmill_db.ledger import CallEnd

from .unit import Unit, share

_NS_PER_HOUR = 3_600_000_000_000


def state_of(completion: Completion) -> CallState:
    known = completion.usage is not None or completion.device_ns is not None
    return CallState.SETTLED if known else CallState.UNKNOWN


def end_of(unit: Unit, step: Step, *, state: CallState, completion: Completion) -> CallEnd:
    return CallEnd(
        seq=unit.seq,
        state=state,
        bound_nanousd=unit.bound_nanousd,
        usage=completion.usage,
        cost_nanousd=call_cost(step, completion.usage, completion.device_ns),
        device_ns=completion.device_ns,
        request_id=completion.request_id,
        latency_ms=completion.latency_ms,
        http_status=200 if step.account else None,
    )


def failed_end(unit: Unit, step: Step, error: CallError) -> CallEnd:
    settled = error.call_state is CallState.SETTLED
    return CallEnd(
        seq=unit.seq,
        state=error.call_state,
        bound_nanousd=unit.bound_nanousd,
        usage=error.usage,
        cost_nanousd=call_cost(step, error.usage, error.device_ns) if settled else None,
        device_ns=error.device_ns,
        wasted=settled,
        error_kind=error.kind,
        http_status=error.http_status,
        request_id=error.request_id,
        latency_ms=error.latency_ms,
    )


def void(unit: Unit) -> CallEnd:
    return CallEnd(seq=unit.seq, state=CallState.VOID, bound_nanousd=unit.bound_nanousd, error_kind="not_sent")


def abandoned(unit: Unit) -> CallEnd:
    """A call that was cut off by a drain: void if it was not sent yet, else it may have been billed."""
    if not unit.sending:
        return void(unit)
    end = CallEnd(seq=unit.seq, state=CallState.UNKNOWN, bound_nanousd=unit.bound_nanousd, error_kind="abandoned")
    share(unit, end)
    return end


def call_cost(step: Step, usage: Usage | None, device_ns: int | None) -> int | None:
    """Cost of one call in nano-USD: by tokens where the step has a price, else by device time, else unknown."""
    if step.price is not None:
        return None if usage is None else cost(usage, step.price)
    if step.device_nanousd_per_hour is not None and device_ns is not None:
        return round_half_even(device_ns * step.device_nanousd_per_hour, _NS_PER_HOUR)
    return None
