"""One model on one device of this host: what its rows are sent through, and what becomes of its engine's deaths."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import Engine, TimesCalls, engine_class
from batchmill_core.errors import BatchmillError, ConfigurationError, EngineDown, EngineLost
from batchmill_core.job import Step
from batchmill_core.request import Completion, Request

from .deaths import Deaths
from .gpu import fit
from .gpu.meter import DeviceMeter
from .lane import EMBED_ROWS
from .unit import Unit
from .window import Window

log = logging.getLogger(__name__)


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
        self._meter = DeviceMeter()
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

    @property
    def side_by_side(self) -> int:
        return max(1, self.engine.capacity_rows)

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
        running, began_ns = self._meter.start(), time.monotonic_ns()
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
        finally:
            device_ns = self._meter.stop(running)
        self._deaths.answered()
        unit.sending = False
        return _metered(completion, device_ns, latency_ms=(time.monotonic_ns() - began_ns) // 1_000_000)

    def _dead(self, fault: EngineLost) -> EngineDown:
        reason = (
            f"the engine died {self._deaths.in_a_row} times without one answer, last: {fault.message}; look at the "
            "device and the system's log (dmesg), then start the worker again"
        )
        self.on_down(reason, for_good=True)
        return EngineDown(reason, ledger=fault.call_state, device_ns=fault.device_ns, latency_ms=fault.latency_ms)

    def describe(self) -> str | None:
        return None


def _metered(completion: Completion, device_ns: int, *, latency_ms: int) -> Completion:
    """Adds the times that an engine does not tell: its device is taken to work on all its calls in equal parts."""
    return replace(
        completion,
        device_ns=device_ns if completion.device_ns is None else completion.device_ns,
        latency_ms=completion.latency_ms or latency_ms,
    )
