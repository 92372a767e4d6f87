"""What an engine did since the last sample, from figures that only ever grow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchmill_core.engine import EngineFigures, Observable
from batchmill_db.samples import EngineReading

from .sampler_bubble import BubbleMeter

log = logging.getLogger(__name__)

_NS = 1_000_000_000


class EngineWatch:
    """One engine, seen between two samples. ``booked`` says how many rows the worker holds ready for it, running ones too."""

    def __init__(
        self,
        engine: Observable,
        *,
        worker: str,
        model: str,
        booked: Callable[[], int],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._last = EngineFigures()
        self._told = False
        self._worker = worker
        self._model = model
        self._booked = booked
        self._clock = clock
        self.bubble = BubbleMeter(lambda: self._figures().busy_ns, clock=clock)
        self._before = (clock(), self._figures(), self.bubble.bubble_ns)

    def _figures(self) -> EngineFigures:
        """The last ones again when the engine fails to tell: a bug of somebody's engine must not fail an attempt."""
        try:
            self._last = self._engine.figures()
        except Exception:
            if not self._told:
                log.exception("engine_figures_failed model=%s", self._model)
            self._told = True
        return self._last

    @contextmanager
    def sampled(self, *, devices: int) -> Iterator[tuple[EngineReading, float]]:
        """(its figures since the last sample, the percent of that time in which it computed), on one of so many devices.

        A block that ends with an error leaves that time to the next sample: nothing of it is lost.
        """
        now_ns, figures, bubble_ns = now = (self._clock(), self._figures(), self.bubble.bubble_ns)
        then_ns, before, bubble_before_ns = self._before
        passed_s = max(1, now_ns - then_ns) / _NS
        tokens = max(0, figures.output_tokens - before.output_tokens)
        reading = EngineReading(
            worker=self._worker,
            model=self._model,
            running=figures.running,
            waiting=max(figures.waiting, self._booked() - figures.running),
            kv_cache_percent=figures.kv_cache_percent,
            batch_rows=figures.batch_rows,
            tokens_per_s=tokens / passed_s / devices,
            bubble_ms=round((bubble_ns - bubble_before_ns) / 1e6),
        )
        yield reading, _share(figures, before, passed_s)
        self._before = now


def _share(now: EngineFigures, before: EngineFigures, passed_s: float) -> float:
    return min(100.0, 100 * max(0, now.busy_ns - before.busy_ns) / _NS / passed_s)
