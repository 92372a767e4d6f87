"""The engines of this process, each with its window: what the rows of a queue are sent through."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from batchmill_core import tokens
from batchmill_core.catalog import Account, Catalog, Limits, ModelEntry
from batchmill_core.engine import Engine, TimesCalls, engine_class
from batchmill_core.errors import BatchmillError, ConfigurationError, EngineDown, EngineLost, Unreachable
from batchmill_core.job import Step
from batchmill_core.request import Completion, Request
from batchmill_core.settings import Settings, api_key

from .answer import QuotaWait, Unit
from .api import quota as api_quota
from .api.engine import ApiEngine
from .deaths import Deaths
from .gpu import fit
from .window import Window

log = logging.getLogger(__name__)

EMBED_ROWS = 64
LONG_PAUSE_S = 5.0
_TOLD_FOR_S = 70.0  # longer than the longest backoff
LINE_S = 2.5  # rows are not booked while those before them wait longer than this for the account's rates


class Lane(Protocol):
    """One engine with its window. ``embed_rows`` is how many rows one embedding call covers."""

    window: Window
    embed_rows: int
    book_rows: int  # how many rows are booked in the ledger together, before they stand in line
    book_tokens: float  # and at most so many tokens, unless it is one row

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def line_s(self, step: Step) -> float:
        """How long a row booked now would wait for rates, in seconds."""

    def tokens_of(self, request: Request) -> int:
        """The tokens that a request is let in with; 0 where they are not limited."""

    def coming(self, step: Step, tokens: Sequence[int]) -> AbstractContextManager[None]:
        """Counts requests as in line that are being booked, and line up when the block is left."""

    def pause_s(self) -> float:
        """For how long the provider asked everybody to wait, in seconds."""

    async def send(self, request: Request, step: Step, unit: Unit) -> Completion: ...

    def describe(self) -> str | None:
        """Why it waits just now, for people; None when it does not."""


class ApiLane:
    """One provider account."""

    embed_rows = EMBED_ROWS

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


class LocalLane:
    """One model on one device of this host. ``on_down`` is told why its engine serves nobody any more."""

    embed_rows = EMBED_ROWS
    book_tokens = math.inf

    def __init__(self, entry: ModelEntry, device: str) -> None:
        if entry.engine is None:
            raise ConfigurationError(f"model {entry.name!r} has no engine; it is served by account {entry.account!r}")
        build: type = engine_class(entry.engine)
        self._entry, self._checked = fit.without_check(entry)
        self._device = device
        self.engine: Engine = build(model=self._entry, device=device)
        self.on_down: Callable[..., None] = lambda reason, *, for_good: None
        self._deaths = Deaths()
        self.window = Window.for_capacity(self.engine.capacity_rows)
        self.book_rows = self.window.batch

    async def start(self) -> None:
        if self._checked:
            await asyncio.to_thread(fit.check_fit, self._entry, self._device)
        try:
            await self.engine.start()
        except BatchmillError:
            raise
        except Exception as fault:
            raise ConfigurationError(
                f"model {self._entry.name} cannot be loaded: {type(fault).__name__}: {fault}"
            ) from fault
        facts = getattr(self.engine, "facts", {})
        log.info(
            "engine_ready model=%s device=%s load_s=%.2f warm_up_s=%.2f",
            self._entry.name,
            self._device,
            facts.get("load_s", 0.0),
            facts.get("warm_up_s", 0.0),
        )
        self.window = Window.for_capacity(self.engine.capacity_rows)
        self.book_rows = self.window.batch

    async def close(self) -> None:
        await self.engine.close()

    def line_s(self, step: Step) -> float:
        return 0.0

    def tokens_of(self, request: Request) -> int:
        return 0

    def coming(self, step: Step, tokens: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def pause_s(self) -> float:
        return 0.0

    async def send(self, request: Request, step: Step, unit: Unit) -> Completion:
        unit.sending = True
        life = self._deaths.life
        try:
            async with asyncio.timeout(None if isinstance(self.engine, TimesCalls) else step.timeout_s):
                completion = await self.engine.complete(request)
        except EngineLost as fault:
            if self._deaths.died(life):
                raise self._dead(fault) from fault
            raise
        except EngineDown as fault:
            self.on_down(fault.message, for_good=False)
            raise
        self._deaths.answered()
        unit.sending = False
        return completion

    def _dead(self, fault: EngineLost) -> EngineDown:
        reason = (
            f"the engine died {self._deaths.in_a_row} times without one answer, last: {fault.message}; look at the "
            "device and the system's log (dmesg), then start the worker again"
        )
        self.on_down(reason, for_good=True)
        return EngineDown(reason, ledger=fault.call_state, device_ns=fault.device_ns, latency_ms=fault.latency_ms)

    def describe(self) -> str | None:
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


def lanes_for(settings: Settings, queues: tuple[str, ...], device: str) -> Mapping[str, Lane]:
    """A lane per queue, not started. Raises ConfigurationError for a queue that the catalogue does not have."""
    catalog = settings.catalog
    lanes: dict[str, Lane] = {}
    for name in queues:
        wing, _, rest = name.partition(".")
        if wing == "api":
            lanes[name] = ApiLane(catalog.account(rest), catalog, settings)
        elif wing == "gpu":
            lanes[name] = LocalLane(catalog.model(rest), device)
        else:
            raise ConfigurationError(f"queue {name!r} is neither api.ACCOUNT nor gpu.MODEL")
    return lanes


def local_engines(lanes: Mapping[str, Lane]) -> Mapping[str, Engine]:
    """The engines of these lanes that run on a device of this host, by model."""
    return {name.partition(".")[2]: lane.engine for name, lane in lanes.items() if isinstance(lane, LocalLane)}
