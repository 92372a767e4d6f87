"""One provider account: what its rows are sent through, and how many of them may stand in line for its rates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from batchmill_core import tokens
from batchmill_core.catalog import Account, Catalog, Limits
from batchmill_core.errors import Unreachable
from batchmill_core.job import Step
from batchmill_core.request import Completion, Request
from batchmill_core.settings import Settings, api_key

from .answer import QuotaWait
from .api import quota as api_quota
from .api.engine import ApiEngine
from .lane import EMBED_ROWS, LINE_S
from .unit import Unit
from .window import Window

_TOLD_FOR_S = 70.0  # longer than the longest backoff


class ApiLane:
    """One provider account."""

    embed_rows = EMBED_ROWS
    side_by_side = 1

    def __init__(self, account: Account, catalog: Catalog, settings: Settings) -> None:
        self.account = account
        models = [m for m in catalog.models.values() if m.account == account.name]
        self.engine = ApiEngine(account, lambda: api_key(account, folder=settings.home), models=models)
        self.window = Window.for_capacity(account.max_in_flight)
        limits = [account.limits, *(m.limits for m in models)]
        self.book_rows = min(self.window.batch, _line_rows(limits))
        self.book_tokens = _line_tokens(limits)
        self._unreachable: tuple[float, str] | None = None  # when last, and why
        self._counts_tokens = any(x.tokens_per_minute for x in limits)

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        await self.engine.close()

    def line_s(self, step: Step) -> float:
        return self.engine.quota.line_s(step.upstream)

    def tokens_of(self, request: Request) -> int:
        return tokens.estimate_tokens(request)[1] if self._counts_tokens else 0

    def coming(self, step: Step, tokens: Sequence[int]) -> AbstractContextManager[None]:
        return self.engine.quota.coming(step.upstream, tokens)

    def pause_s(self) -> float:
        return self.engine.quota.paused_s

    async def send(self, request: Request, step: Step, unit: Unit) -> Completion:
        try:
            async with self.engine.quota.admit(step.upstream, self.tokens_of(request)) as permit:
                unit.sending = True
                completion = await self.engine.complete(request)
                self._unreachable = None
                if self._counts_tokens and completion.usage is not None:
                    permit.used(completion.usage.total)
                unit.sending = False
                return completion
        except api_quota.QuotaWait as wait:
            raise QuotaWait(wait.wait_s, str(wait)) from wait
        except Unreachable as fault:
            self._unreachable = (time.monotonic(), fault.message)
            raise

    def describe(self) -> str | None:
        quota = self.engine.quota
        if self._unreachable is not None and time.monotonic() - self._unreachable[0] < _TOLD_FOR_S:
            return f"account {self.account.name} cannot be reached ({self._unreachable[1]}); rows wait and try again"
        if quota.in_vain:
            return f"account {self.account.name}: the provider turns every call away; one is tried every few seconds"
        if quota.paused_s >= 1:
            return f"account {self.account.name}: the provider asked to wait {quota.paused_s:.0f} s more"
        if quota.waiting and quota.adaptive.limit < self.account.max_in_flight:
            return f"account {self.account.name}: throttled to {quota.adaptive.limit} calls in flight"
        return None


def _line_rows(limits: Sequence[Limits]) -> int:
    """How many rows the slowest of these rates lets through within `LINE_S`; 1 at least."""
    rates = [x.requests_per_second for x in limits if x.requests_per_second is not None]
    rates += [x.requests_per_minute / 60 for x in limits if x.requests_per_minute is not None]
    return max(1, int(min(rates, default=1e6) * LINE_S))


def _line_tokens(limits: Sequence[Limits]) -> float:
    """How many tokens the slowest of these rates lets through within `LINE_S`."""
    rates = [x.tokens_per_minute / 60 for x in limits if x.tokens_per_minute is not None]
    return min(rates, default=math.inf) * LINE_S
