"""The way of one request: quota, engine, parse, validate, accept; or retry, hand back, give up.

A unit is what one call covers: one row for chat, many for embeddings. Its calls are booked in the ledger before they
are sent and ended with what is known of their cost; each row carries its share, so that rows sum to calls exactly.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchmill_core.errors import CallError, CallTimeout, EngineFailed, EngineLost, MalformedResponse
from batchmill_core.job import Step
from batchmill_core.request import Completion, RowStatus, TaskKind
from batchmill_db.ledger import CallEnd
from batchmill_db.results import NewResult

from . import retry, validation
from .call_ends import abandoned, end_of, failed_end, state_of, void
from .unit import Item, Unit, share

_MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Handback:
    """Rows that cannot be finished here and now: they go on in a derived chunk after ``wait_s``."""

    rows: Sequence[int]
    wait_s: float = 0.0
    error: str | None = None
    next_step: bool = False


class Way(Protocol):
    """What the way of a request needs of the attempt that it belongs to."""

    step: Step
    task: TaskKind
    rng: random.Random
    validator: Any
    more_steps: bool

    async def send(self, unit: Unit) -> Completion:
        """Waits for the quota, then asks the engine. Raises CallError, or `QuotaWait` when the wait is long."""

    async def book_again(self, unit: Unit) -> bool:
        """Books the next call of a unit; False when the attempt must not send any more."""

    def save(self, rows: Sequence[NewResult], ends: Sequence[CallEnd]) -> None: ...

    def hand_back(self, handback: Handback) -> None: ...

    def crash(self, error: CallError) -> None:
        """The engine died with this call in it: the attempt ends, its unfinished rows are looked at more closely."""

    def stop_account(self, error: CallError) -> None: ...

    def stop_job(self, error: CallError) -> None: ...


class QuotaWait(Exception):
    """The account has no room for ``wait_s`` seconds, longer than a row should wait in the loop."""

    def __init__(self, wait_s: float, reason: str) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.reason = reason


async def answer(unit: Unit, way: Way, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Answers a unit whose call is booked; its rows are saved or handed back when this returns."""
    while True:
        try:
            completion = await way.send(unit)
            rows = _accept(unit, completion, way)
        except QuotaWait as wait:
            way.save((), [void(unit)])
            way.hand_back(Handback(rows=unit.rows, wait_s=wait.wait_s, error=wait.reason))
            return
        except asyncio.CancelledError:
            way.save((), [abandoned(unit)])
            way.hand_back(Handback(rows=unit.rows))
            return
        except CallError as error:
            if not await _after_error(unit, error, way, sleep):
                return
        else:
            end = end_of(unit, way.step, state=state_of(completion), completion=completion)
            share(unit, end)
            way.save([_result(i, r, way.step) for i, r in zip(unit.items, rows, strict=True)], [end])
            return


async def _after_error(unit: Unit, error: CallError, way: Way, sleep: Callable[[float], Awaitable[None]]) -> bool:
    """Books how the call ended and decides; True when the unit's next call is booked and may be sent."""
    unit.sending = False
    end = failed_end(unit, way.step, error)
    share(unit, end)
    unit.waits = unit.waits + 1 if error.waits else 0
    unit.tries += 0 if error.waits else 1
    if isinstance(error, EngineLost):
        way.save((), [end])
        way.crash(error)
        return False
    decision = retry.decide(error, tries=unit.tries, max_retries=way.step.max_retries, waits=unit.waits, rng=way.rng)
    if isinstance(decision, retry.GiveUp):
        return await _give_up(unit, error, decision.status, end, way, sleep)
    way.save((), [end])
    if isinstance(decision, retry.Retry):
        return await _wait_and_book(unit, decision.delay_s, way, sleep)
    wait_s = decision.delay_s if isinstance(decision, retry.Snooze) else 0.0
    if isinstance(decision, retry.StopAccount):
        way.stop_account(error)
    elif isinstance(decision, retry.StopJob):
        way.stop_job(error)
    way.hand_back(Handback(rows=unit.rows, wait_s=wait_s, error=f"{error.kind}: {error.message[:_MESSAGE_CHARS]}"))
    return False


async def _wait_and_book(unit: Unit, delay_s: float, way: Way, sleep: Callable[[float], Awaitable[None]]) -> bool:
    try:
        await sleep(delay_s)
        booked = await way.book_again(unit)
    except asyncio.CancelledError:
        booked = False
    if not booked:
        way.hand_back(Handback(rows=unit.rows))
    return booked


async def _give_up(
    unit: Unit,
    error: CallError,
    status: RowStatus,
    end: CallEnd,
    way: Way,
    sleep: Callable[[float], Awaitable[None]],
) -> bool:
    """The rows end here, unless another row of the same call may be at fault or the route goes on."""
    if len(unit.items) > 1 and not error.retryable:
        way.save((), [end])
        middle = len(unit.items) // 2
        for items in (unit.items[:middle], unit.items[middle:]):
            half = Unit(items=items, tries=unit.tries - 1)
            if await way.book_again(half):
                await answer(half, way, sleep=sleep)
            else:
                way.hand_back(Handback(rows=half.rows))
        return False
    if way.more_steps:
        way.save((), [end])
        way.hand_back(Handback(rows=unit.rows, error=error.kind, next_step=True))
        return False
    way.save(_failed(unit, error, status, way.step), [end])
    return False


def _failed(unit: Unit, error: CallError, status: RowStatus, step: Step) -> list[NewResult]:
    return [_result(i, _Answer(status=status, error=error), step) for i in unit.items]


def given_up(unit: Unit, fault: BaseException, step: Step) -> tuple[list[NewResult], list[CallEnd]]:
    """What a fault of our own on the last try comes to: rows that failed, and a call that may have been billed."""
    error = EngineFailed(f"internal error: {fault!r}"[:_MESSAGE_CHARS])
    end = failed_end(unit, step, error)
    share(unit, end)
    return _failed(unit, error, RowStatus.FAILED, step), [end]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: RowStatus
    output: str | None = None
    embedding: bytes | None = None
    sanitized: bool = False
    completion: Completion | None = None
    error: CallError | None = None


def _accept(unit: Unit, completion: Completion, way: Way) -> list[_Answer]:
    """One answer per row. Raises InvalidOutput or MalformedResponse when the completion is not usable."""
    if way.task is TaskKind.EMBED:
        if len(completion.vectors) != len(unit.items):
            raise MalformedResponse(
                f"{len(completion.vectors)} vectors for {len(unit.items)} inputs",
                usage=completion.usage,
                latency_ms=completion.latency_ms,
                device_ns=completion.device_ns,
            )
        return [_Answer(status=RowStatus.OK, embedding=v, completion=completion) for v in completion.vectors]
    status = validation.status_of(completion)
    text = completion.text if completion.refusal is None else completion.refusal
    if text is None:
        return [_Answer(status=status, completion=completion)]
    text, changed = validation.sanitize(text)
    if status is RowStatus.OK and way.validator is not None:
        text = _checked(text, completion, way)
    return [_Answer(status=status, output=text, sanitized=changed, completion=completion)]


def _checked(text: str, completion: Completion, way: Way) -> str:
    try:
        _, canonical = validation.check_output(text, way.validator)
    except CallError as error:
        error.usage, error.latency_ms, error.device_ns = completion.usage, completion.latency_ms, completion.device_ns
        error.request_id = completion.request_id
        error.call_state = state_of(completion)
        raise
    return canonical


def _result(item: Item, answer: _Answer, step: Step) -> NewResult:
    completion, error = answer.completion, answer.error
    return NewResult(
        row=item.row,
        status=answer.status,
        output=answer.output,
        embedding=answer.embedding,
        finish_reason=None if completion is None else completion.finish_reason,
        error_kind=None if error is None else error.kind,
        error=None if error is None else validation.sanitize(error.message[:_MESSAGE_CHARS])[0],
        raw=None if error is None or error.raw is None else validation.sanitize(error.raw)[0],
        model=step.model,
        account=step.account,
        usage=item.usage,
        cost_nanousd=item.cost_nanousd,
        unknown_nanousd=item.unknown_nanousd,
        calls=item.calls,
        sanitized=item.sanitized or answer.sanitized,
        latency_ms=None if completion is None else completion.latency_ms,
        ttft_ms=None if completion is None else completion.ttft_ms,
        seqs=tuple(item.seqs),
        replaces=item.replaces,
    )


def as_call_error(fault: BaseException) -> CallError:
    """Translates what an engine should not have raised, so that one row's trouble stays that row's."""
    if isinstance(fault, TimeoutError):
        return CallTimeout("the engine did not answer in time")
    return EngineFailed(f"{type(fault).__name__}: {fault}"[:_MESSAGE_CHARS])
