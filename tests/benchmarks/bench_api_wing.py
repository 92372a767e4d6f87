"""Durable rows per second through API workers: simulator, broker, database and workers all on this machine.

``make bench`` runs it; ``python -m tests.benchmarks.bench_api_wing --rows 20000`` alone. Prints medians of several runs:
rows/s from the first claim to the last save, CPU per row of the worker processes, and how much of in-flight / latency
was reached while latency was the bound.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import psutil

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_ops.report import read_report
from batchmill_ops.simulator import SimulatorConfig
from tests.benchmarks.mills import mill
from tests.integration.harness import Mill

LATENCY_S = 0.1
TEXT = "I bought it in May and use it daily. The battery is excellent, the strap less so. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One run: rows per second, and CPU seconds per row of all workers together."""

    rows_per_s: float
    cpu_ms_per_row: float


def measure(running: Mill, rows: int) -> Figure:
    """One job of ``rows`` rows on workers that run already."""
    data = [{"n": n, "text": TEXT} for n in range(rows)]
    processes = [psutil.Process(w.pid) for w in running.workers]
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    job = running.submit(data, chunk_size=500)
    done = running.wait_state(job, JobState.DONE, timeout_s=300)
    after = sum(sum(p.cpu_times()[:2]) for p in processes)
    report = read_report(running.database, job.id)
    assert done.done == rows, f"{done.done} of {rows} rows are done"
    answered = done.by_status[RowStatus.OK] + done.by_status[RowStatus.TRUNCATED]
    assert answered == rows, f"not all are answered: {done.by_status}"
    return Figure(rows_per_s=report.rows_per_s or 0.0, cpu_ms_per_row=(after - before) / rows * 1000)


def run(name: str, *, workers: int, in_flight: int, rows: int, repeats: int) -> Figure:
    provider = SimulatorConfig(latency_s=LATENCY_S, kept_calls=0)
    with mill(provider, account={"max_in_flight": in_flight}) as running:
        for _ in range(workers):
            running.start_worker()
        measure(running, min(rows, 1000))  # warms connections and code
        figures = [measure(running, rows) for _ in range(repeats)]
    figure = Figure(
        rows_per_s=statistics.median(f.rows_per_s for f in figures),
        cpu_ms_per_row=statistics.median(f.cpu_ms_per_row for f in figures),
    )
    print(
        f"{name:<44} {figure.rows_per_s:>8,.0f} rows/s   {figure.cpu_ms_per_row:.2f} ms CPU/row   (runs: "
        f"{', '.join(f'{f.rows_per_s:,.0f}' for f in figures)})",
        flush=True,
    )
    return figure


def report(rows: int, repeats: int) -> None:
    run("one worker, 256 in flight, 100 ms", workers=1, in_flight=256, rows=rows, repeats=repeats)
    run("two workers, 256 in flight each, 100 ms", workers=2, in_flight=256, rows=rows, repeats=repeats)
    bound = run("one worker, 64 in flight, 100 ms", workers=1, in_flight=64, rows=rows // 4, repeats=repeats)
    print(f"{'in-flight / latency reached with 64':<44} {bound.rows_per_s / (64 / LATENCY_S):>8.0%}")


def test_rows_per_second_of_the_api_wing() -> None:
    report(rows=20_000, repeats=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    report(arguments.rows, arguments.repeats)
