"""What vLLM's scheduler does just now, from the statistics that it gives after each step."""

from __future__ import annotations

import importlib
from typing import Any

from .frames import Frame


class Figures:
    """The last step's figures, and the mean size of the batches since they were taken last."""

    def __init__(self) -> None:
        self._running = self._waiting = 0
        self._cache_share = 0.0
        self._steps = self._rows = 0
        self._all_steps = 0

    def step(self, *, running: int, waiting: int, cache_share: float) -> None:
        """One step of the engine: requests in its batch, requests that wait, and the used share of the cache."""
        self._running, self._waiting, self._cache_share = running, waiting, cache_share
        if running:
            self._steps += 1
            self._all_steps += 1
            self._rows += running

    def take(self) -> Frame:
        """Figures for the worker; ``batch_rows`` is None when no step ran since the last time.

        ``steps`` counts all there were, so that a batch that came further is never told as it was before.
        """
        mean = self._rows / self._steps if self._steps else None
        self._steps = self._rows = 0
        return {
            "running": self._running,
            "waiting": self._waiting,
            "batch_rows": mean,
            "steps": self._all_steps,
            "kv_cache_percent": round(100 * self._cache_share, 2),
        }


def stat_logger(figures: Figures) -> Any:
    """A factory of vLLM's loggers of statistics that feeds ``figures``."""
    base = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase

    class Logger(base):  # type: ignore[misc, valid-type]  # known at run time only
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any = None, *_more: Any, **_named: Any) -> None:
            if scheduler_stats is not None:
                figures.step(
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs,
                    cache_share=scheduler_stats.kv_cache_usage,
                )

        def log_engine_initialized(self) -> None:
            pass

    return lambda config, index=0: Logger(config, index)
