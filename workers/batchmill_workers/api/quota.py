"""Who may send now: the limits of one account and its models within this process.

This is the seam where sharing them across processes comes later: whoever sends asks ``admit`` and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType

from batchmill_core.catalog import Limits
from batchmill_core.errors import BatchmillError, CallError, CallState, Overloaded, RateLimited, Unreachable

from .bucket import Allowance
from .concurrency import AdaptiveLimit

MAX_WAIT_S = 5.0
# While one call at a time fails in vain, the next is tried after a pause that doubles up to here: below MAX_WAIT_S, so
# that rows stay in line and go on within seconds of the end of the outage. Without it a provider that is away for an
# hour was asked, and the ledger written, 400 times a second.
_FIRST_VAIN_S = 0.1
_LONGEST_VAIN_S = 4.0
_TIMER_SLACK_S = 0.001  # uvloop's timers count milliseconds and may fire one early
_NO_MODELS: Mapping[str, Limits] = MappingProxyType({})


class QuotaWait(BatchmillError):
    """The turn of a row comes later than its caller is willing to wait; nothing was taken and nothing sent."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"the account's limits leave no room for {wait_s:.1f} s")
        self.wait_s = wait_s


class Permit:
    """Leave to send one request, as an async context manager; leaving it gives the place in flight back.

    ``used`` corrects the estimate of tokens by what the provider counted. A call that surely did not run (its CallError
    leaves the block, and its ledger line is void) gives its tokens back by itself.
    """

    __slots__ = ("_quota", "lane", "max_wait_s", "number", "tokens", "turn")

    def __init__(self, quota: Quota, lane: _Lane, tokens: int, max_wait_s: float) -> None:
        self._quota = quota
        self.lane = lane
        self.tokens = tokens
        self.max_wait_s = max_wait_s
        self.number = 0
        self.turn: asyncio.Future[None] | None = None

    def used(self, tokens: int) -> None:
        self._quota.correct(self, tokens)
        self.tokens = tokens

    async def __aenter__(self) -> Permit:
        if not self._quota.enter_at_once(self):
            await self._quota.wait_for_turn(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, CallError) and error.call_state is CallState.VOID:
            self.used(0)
        self._quota.leave()


class _Lane:
    """The line of one model, first come, first served, and its own allowance."""

    __slots__ = ("allowance", "waiting")

    def __init__(self, limits: Limits) -> None:
        self.allowance = Allowance(limits)
        self.waiting: deque[Permit] = deque()


class Quota:
    """All limits of one account in this process. Lives on one event loop; not thread-safe.

    ``models`` holds the limits that single models have, under their upstream names. ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        max_in_flight: int,
        models: Mapping[str, Limits] = _NO_MODELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._account = Allowance(limits)
        self._models = models
        self._lanes: dict[str, _Lane] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0
        self.clock = clock
        self.adaptive = AdaptiveLimit(max_in_flight)
        self.in_flight = 0
        self.waiting = 0
        self.paused_until = float("-inf")
        self._vain_pause_s = 0.0

    def admit(self, model: str, tokens: int = 0, *, max_wait_s: float = MAX_WAIT_S) -> Permit:
        """``async with quota.admit(model, tokens) as permit:`` waits for its turn, in order of arrival per model.

        ``tokens`` is an estimate of input and output. Raises QuotaWait, having taken nothing, when rates or a pause put
        the turn further off than ``max_wait_s``; waiting for a place in flight has no limit, since calls end.
        """
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = _Lane(self._models.get(model, Limits()))
        return Permit(self, lane, tokens, max_wait_s)

    @property
    def paused_s(self) -> float:
        """For how long nobody may send."""
        return max(0.0, self.paused_until - self.clock())

    @property
    def in_vain(self) -> bool:
        """Whether even one call at a time is turned away just now, so that the next are tried seconds apart."""
        return self._vain_pause_s >= 1.0

    def line_s(self, model: str, tokens: int = 0) -> float:
        """How long a newcomer would wait for rates, behind all who stand in line now, in seconds."""
        return self._rates_wait_s(self.admit(model, tokens), self.clock(), in_line=True)

    @contextmanager
    def coming(self, model: str, tokens: Sequence[int]) -> Iterator[None]:
        """Counts requests as in line that will line up when the block is left, one for each estimate of ``tokens``."""
        allowances = (self._account, self.admit(model).lane.allowance)
        for allowance in allowances:
            allowance.count_in_line(sum(tokens), 1, requests=len(tokens))
        try:
            yield
        finally:
            for allowance in allowances:
                allowance.count_in_line(sum(tokens), -1, requests=len(tokens))

    def pause(self, wait_s: float) -> None:
        """Nobody sends for ``wait_s``; who would wait too long is told so at once. Never shortens a pause."""
        self.paused_until = max(self.paused_until, self.clock() + wait_s)
        self._turn_away()
        self._admit_waiting()

    def succeeded(self, *, latency_s: float) -> None:
        """A call was answered after ``latency_s``."""
        self._vain_pause_s = 0.0
        self.adaptive.succeeded(latency_s=latency_s, in_flight=self.in_flight)

    def failed(self, error: CallError) -> None:
        """A call failed: adapts the limit in flight, and pauses the account where the provider asked to wait.

        One that cannot be reached, or turns calls away without a word of when, is asked less and less often.
        """
        self.adaptive.failed(error)
        before, self._vain_pause_s = self._vain_pause_s, 0.0
        if error.wait_s and isinstance(error, RateLimited | Overloaded):
            self.pause(error.wait_s)
        elif isinstance(error, RateLimited | Unreachable) and self.adaptive.limit == 1:
            self._vain_pause_s = min(_LONGEST_VAIN_S, max(_FIRST_VAIN_S, 2 * before))
            self.pause(self._vain_pause_s)

    # what permits call

    def enter_at_once(self, permit: Permit) -> bool:
        """Lets ``permit`` in if nothing stands in its way."""
        if self.waiting or self.in_flight >= self.adaptive.limit:
            return False
        now = self.clock()
        if now < self.paused_until or self._rates_wait_s(permit, now) > 0.0:
            return False
        self._enter(permit, now)
        return True

    async def wait_for_turn(self, permit: Permit) -> None:
        """Lines ``permit`` up. Raises QuotaWait at once if its turn is too far off."""
        now = self.clock()
        wait = max(self.paused_until - now, self._rates_wait_s(permit, now, in_line=True))
        if wait > permit.max_wait_s:
            raise QuotaWait(wait)
        permit.turn = asyncio.get_running_loop().create_future()
        self._line_up(permit)
        self._admit_waiting()
        try:
            await permit.turn
        except asyncio.CancelledError:
            self._abandon(permit, permit.turn)
            raise

    def correct(self, permit: Permit, tokens: int) -> None:
        """Charges ``tokens`` instead of what ``permit`` was let in with."""
        self._account.correct(tokens=tokens - permit.tokens)
        permit.lane.allowance.correct(tokens=tokens - permit.tokens)

    def leave(self) -> None:
        """One call less is in flight."""
        self.in_flight -= 1
        if self.waiting:
            self._admit_waiting()

    # the line

    def _rates_wait_s(self, permit: Permit, now: float, *, in_line: bool = False) -> float:
        wait = 0.0
        if not self._account.unlimited:
            wait = self._account.wait_s(permit.tokens, now=now, in_line=in_line)
        if not permit.lane.allowance.unlimited:
            wait = max(wait, permit.lane.allowance.wait_s(permit.tokens, now=now, in_line=in_line))
        return wait

    def _enter(self, permit: Permit, now: float) -> None:
        self._account.take(permit.tokens, now=now)
        permit.lane.allowance.take(permit.tokens, now=now)
        self.in_flight += 1

    def _line_up(self, permit: Permit) -> None:
        self._number += 1
        permit.number = self._number
        permit.lane.waiting.append(permit)
        self._count_in_line(permit, 1)

    def _count_in_line(self, permit: Permit, sign: int) -> None:
        self.waiting += sign
        self._account.count_in_line(permit.tokens, sign)
        permit.lane.allowance.count_in_line(permit.tokens, sign)

    def _abandon(self, permit: Permit, turn: asyncio.Future[None]) -> None:
        """The caller was cancelled: out of the line, or, if its turn had just come, everything back."""
        if permit in permit.lane.waiting:
            permit.lane.waiting.remove(permit)
            self._count_in_line(permit, -1)
            self._admit_waiting()
        elif not turn.cancelled() and turn.exception() is None:
            self._account.correct(requests=-1, tokens=-permit.tokens)
            permit.lane.allowance.correct(requests=-1, tokens=-permit.tokens)
            self.leave()

    def _admit_waiting(self) -> None:
        """Lets in all who may go now, and sets the timer for the next who must let time pass."""
        now = self.clock()
        wait = max(self.paused_until - now, 0.0)
        if wait == 0.0:
            wait = self._admit_heads(now)
        self._set_timer(wait if self.waiting and wait > 0.0 else None)

    def _admit_heads(self, now: float) -> float:
        """Lets in the heads of the lanes, the earliest first. Returns how long the next must wait for rates, or 0.0.

        A head that its model's own rates hold up lets other models pass; one that the account's rates hold up does
        not, or a large request would never find room.
        """
        waits: list[float] = []
        lanes = [lane for lane in self._lanes.values() if lane.waiting]
        while lanes and self.in_flight < self.adaptive.limit:
            lane = min(lanes, key=lambda one: one.waiting[0].number)
            permit = lane.waiting[0]
            own = lane.allowance.wait_s(permit.tokens, now=now)
            shared = 0.0 if own else self._account.wait_s(permit.tokens, now=now)
            if shared:
                waits.append(shared)
                break
            if own:
                waits.append(own)
                lanes.remove(lane)
                continue
            self._admit_head(lane, now)
            if not lane.waiting:
                lanes.remove(lane)
        return min(waits, default=0.0)

    def _admit_head(self, lane: _Lane, now: float) -> None:
        permit = lane.waiting.popleft()
        self._count_in_line(permit, -1)
        if permit.turn is not None and not permit.turn.done():
            self._enter(permit, now)
            permit.turn.set_result(None)

    def _turn_away(self) -> None:
        """Tells those in line whose patience is shorter than the pause."""
        pause_s = self.paused_s
        for lane in self._lanes.values():
            impatient = [p for p in lane.waiting if p.max_wait_s < pause_s]
            for permit in impatient:
                lane.waiting.remove(permit)
                self._count_in_line(permit, -1)
                if permit.turn is not None and not permit.turn.done():
                    permit.turn.set_exception(QuotaWait(pause_s))

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None:
            self._timer = asyncio.get_running_loop().call_later(delay_s + _TIMER_SLACK_S, self._admit_waiting)
