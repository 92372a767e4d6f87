"""From `submit` returning to the first row saved, on an idle stack whose provider answers at once. Median of ten jobs."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from sqlalchemy import func, select

from batchmill_db.schema import result
from batchmill_ops.simulator import SimulatorConfig
from tests.integration.harness import milling
from tests.servers import Valkey


def measure(repeats: int = 10) -> float:
    """Milliseconds, by one clock of this host; looked at every 2 ms."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        valkey = Valkey(home, appendonly=True)
        valkey.start()
        try:
            with milling(
                home,
                broker_url=valkey.url,
                database_url=f"sqlite:///{home / 'batchmill.db'}",
                provider=SimulatorConfig(latency_s=0.0, kept_calls=0),
            ) as mill:
                mill.start_worker()
                waits = []
                for _ in range(repeats + 1):
                    job = mill.submit(20)
                    submitted = time.perf_counter()
                    first = select(func.count()).where(result.c.job_id == job.id)
                    while True:
                        with mill.database.reading() as conn:
                            if conn.execute(first).scalar_one():
                                break
                        assert time.perf_counter() - submitted < 30, "no row was saved within 30 s"
                        time.sleep(0.002)
                    waits.append((time.perf_counter() - submitted) * 1000)
                    mill.wait_done(job)
        finally:
            valkey.kill()
    figure = statistics.median(waits[1:])
    print(f"first row saved {figure:.0f} ms after submit returned (runs: {', '.join(f'{w:.0f}' for w in waits[1:])})")
    return figure


def test_time_to_the_first_row() -> None:
    assert measure() > 0


if __name__ == "__main__":
    measure()
