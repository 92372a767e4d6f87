"""When one call to a local engine ran, and its share of the device's time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from .meter import DeviceMeter


class CallTimes:
    """The times of one call: it runs as long as the block of ``running``, and is charged for the device from ``charge`` on."""

    def __init__(self, meter: DeviceMeter) -> None:
        self._meter = meter
        self._token: int | None = None
        self._began_ns: int | None = None
        self._ended_ns: int | None = None
        self.device_ns: int | None = None  # known once it has ended; None for a call that the device never saw

    @contextmanager
    def running(self) -> Iterator[None]:
        self._began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._ended_ns = time.monotonic_ns()
            if self._token is not None:
                self.device_ns = self._meter.stop(self._token)

    def charge(self) -> None:
        """The device has the call now. Idempotent."""
        if self._token is None:
            self._token = self._meter.start()

    @property
    def began_at_s(self) -> float | None:
        """The moment on the monotonic clock at which it began; None: it did not."""
        return None if self._began_ns is None else self._began_ns / 1e9

    @property
    def latency_ms(self) -> int:
        """0 for a call that has not ended."""
        return 0 if self._began_ns is None or self._ended_ns is None else (self._ended_ns - self._began_ns) // 1_000_000

    def ms_until(self, moment_ns: int | None) -> int | None:
        """Milliseconds from its begin to a moment of the same host's monotonic clock."""
        if moment_ns is None or self._began_ns is None:
            return None
        return max(0, moment_ns - self._began_ns) // 1_000_000
