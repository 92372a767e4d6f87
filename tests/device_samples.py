"""Samples of devices as workers would have recorded them, at times that a test names."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert

from batchmill_db.schema import device_sample
from batchmill_db.session import Database, now_ms

GIB = 1 << 30
BUSY: dict[str, Any] = {
    "use_percent": 95.0,
    "memory_used_bytes": 110 * GIB,
    "memory_total_bytes": 140 * GIB,
    "power_w": 600.0,
    "temperature_c": 64.0,
    "clock_mhz": 1980,
    "running": 64,
    "waiting": 12,
    "kv_cache_percent": 71.0,
    "batch_rows": 48.0,
    "tokens_per_s": 4000.0,
    "bubble_ms": 50,
}
STARVED = {**BUSY, "use_percent": 9.0, "waiting": 500, "running": 2, "bubble_ms": 3000, "tokens_per_s": 200.0}
IDLE = {**BUSY, "use_percent": 0.0, "waiting": 0, "running": 0, "bubble_ms": 0, "tokens_per_s": 0.0}


def sampled(
    database: Database,
    figures: dict[str, Any],
    *,
    first_s: float,
    last_s: float = 0.0,
    every_s: float = 5.0,
    host: str = "node-a",
    device: str = "0",
    worker: str | None = "gpu0@node-a",
    model: str | None = "small",
) -> None:
    """A sample with these figures every ``every_s`` from ``first_s`` seconds ago until ``last_s`` seconds ago."""
    where = {"host": host, "device": device, "worker": worker, "model": model}
    with database.transaction() as conn:
        ago_s = first_s
        while ago_s >= last_s:
            conn.execute(insert(device_sample).values(at_ms=now_ms() - int(ago_s * 1000), **where, **figures))
            ago_s -= every_s
