"""What the seed decides: the latency of a call and whether it ends in a fault."""

from __future__ import annotations

import math
import random
from itertools import accumulate

from .config import LatencyShape, SimulatorConfig


class Chance:
    """Draws from one seeded sequence, so that the same calls in the same order meet the same luck.

    Faults and latencies have a sequence each: changing the latency leaves the faults where they were.
    """

    def __init__(self, config: SimulatorConfig) -> None:
        self._latencies = random.Random(f"{config.seed} latency")
        self._faults = random.Random(f"{config.seed} faults")
        self._mean_s = config.latency_s
        self._jitter = config.latency_jitter
        self._uniform = config.latency_shape is LatencyShape.UNIFORM
        self._sigma = math.sqrt(math.log1p(config.latency_jitter**2))
        self._mu = math.log(config.latency_s) - self._sigma**2 / 2 if config.latency_s > 0 else 0.0
        bounds = accumulate(fault.probability for fault in config.faults)
        self._bounds = tuple(zip(bounds, (fault.kind for fault in config.faults), strict=True))

    def latency_s(self) -> float:
        """The next latency in seconds; the mean of many is the configured one."""
        if not self._jitter or not self._mean_s:
            return self._mean_s
        if self._uniform:
            return self._mean_s * (1 + self._jitter * self._latencies.uniform(-1, 1))
        return self._latencies.lognormvariate(self._mu, self._sigma)

    def fault(self) -> str | None:
        """The kind of fault that the next call meets, or None."""
        if not self._bounds:
            return None
        draw = self._faults.random()
        return next((kind for bound, kind in self._bounds if draw < bound), None)
