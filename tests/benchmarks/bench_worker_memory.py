"""Peak memory of an API worker process at two sizes of a job. Embeddings, 64 rows a call, so that many rows go fast.

``python -m tests.benchmarks.bench_worker_memory``. Each size has a worker of its own, so that its peak is its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus, TaskKind
from batchmill_ops.report import read_report
from batchmill_ops.simulator import SimulatorConfig
from tests.benchmarks.mills import mill

TEXT = "I bought it in May and use it daily. The battery is excellent, the strap less so. " * 3


def peak_mb(pid: int) -> float:
    """What the kernel says was the most that a process had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(rows: int) -> float:
    provider = SimulatorConfig(latency_s=0.02, kept_calls=0)
    with mill(provider, account={"max_in_flight": 64}) as running:
        worker = running.start_worker()
        data = [{"n": n, "text": TEXT} for n in range(rows)]
        job = running.submit(
            data, model="sim-embed", prompt="{{ text }}", task=TaskKind.EMBED, params={}, chunk_size=1000
        )
        done = running.wait_state(job, JobState.DONE, timeout_s=600)
        assert done.by_status[RowStatus.OK] == rows, f"not all are answered: {done.by_status}"
        rate = read_report(running.database, job.id).rows_per_s or 0.0
        peak = peak_mb(worker.pid)
    print(f"worker, {rows:>9,} rows of embeddings: peak memory {peak:.0f} MB, {rate:,.0f} rows/s", flush=True)
    return peak


def report(small: int, large: int) -> None:
    first, second = measure(small), measure(large)
    print(f"worker: peak memory at {large:,} rows is {second / first:.2f} times that at {small:,}")


def test_peak_memory_of_a_worker() -> None:
    report(100_000, 1_000_000)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs=2, default=[100_000, 1_000_000])
    report(*parser.parse_args().rows)
