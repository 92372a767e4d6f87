"""From `submit` returning to the first row saved, on an idle stack whose provider answers at once. Median of ten jobs."""

from __future__ import annotations

import statistics
import time

from sqlalchemy import func, select

from batchmill_db.schema import result
from batchmill_ops.simulator import SimulatorConfig
from tests.benchmarks.mills import mill
from tests.integration.harness import Mill


def _first_row_ms(running: Mill) -> float:
    job = running.submit(20)
    submitted = time.perf_counter()
    saved = select(func.count()).where(result.c.job_id == job.id)
    while True:
        with running.database.reading() as conn:
            if conn.execute(saved).scalar_one():
                break
        assert time.perf_counter() - submitted < 30, "no row was saved within 30 s"
        time.sleep(0.002)
    waited_ms = (time.perf_counter() - submitted) * 1000
    running.wait_done(job)
    return waited_ms


def measure(repeats: int = 10) -> float:
    """Milliseconds, by one clock of this host; looked at every 2 ms."""
    with mill(SimulatorConfig(latency_s=0.0, kept_calls=0)) as running:
        running.start_worker()
        waits = [_first_row_ms(running) for _ in range(repeats + 1)]
    figure = statistics.median(waits[1:])
    print(f"first row saved {figure:.0f} ms after submit returned (runs: {', '.join(f'{w:.0f}' for w in waits[1:])})")
    return figure


def test_time_to_the_first_row() -> None:
    assert measure() > 0


if __name__ == "__main__":
    measure()
