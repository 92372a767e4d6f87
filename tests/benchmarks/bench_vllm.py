"""Tokens per second of the vLLM engine against bare ``LLM.chat`` over the same rows, as a ratio.

Rounds alternate, each side in a process of its own that loads, warms up and answers all rows at once; the ratio of
medians is what counts. Run it with the Python that has vLLM, Batchmill and pytest, as ``ops/vllm-check`` is:
``python -m tests.benchmarks.bench_vllm MODEL_FOLDER``; about ten minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.request import Request

MODEL = "BATCHMILL_TEST_VLLM_MODEL"  # a folder of safetensors
TOLD = "measured: "
ROOT = Path(__file__).parents[2]
MAX_TOKENS = 24
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 32,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,  # a round must not profit from the warm-up
}
Messages = list[dict[str, str]]
Round = tuple[int, float]  # output tokens, and the seconds that they took


def conversations(rows: int) -> list[Messages]:
    things = ("kettle", "backpack", "lamp", "jacket", "grinder", "headset", "tent", "scale")
    texts = (f"Write one sentence about a {things[n % len(things)]} that costs {n + 3} dollars." for n in range(rows))
    return [[{"role": "user", "content": text}] for text in texts]


def bare(folder: str, rows: int) -> Round:
    """vLLM alone, in the environment in which the engine runs it."""
    from batchmill_workers.gpu.vllm_loading import prepare_environment

    prepare_environment(os.environ)
    vllm = importlib.import_module("vllm")
    model = vllm.LLM(model=folder, **OPTIONS)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    model.chat(conversations(2), sampling, use_tqdm=False)
    began = time.monotonic()
    outputs = model.chat(conversations(rows), sampling, use_tqdm=False)
    seconds = time.monotonic() - began
    return sum(len(one.outputs[0].token_ids) for one in outputs), seconds


def through(folder: str, rows: int) -> Round:
    """Our engine."""
    from batchmill_workers.gpu.vllm import VllmEngine

    entry = ModelEntry(name="m", engine="vllm", source=folder, options=OPTIONS)
    params = {"max_tokens": MAX_TOKENS, "temperature": 0}

    async def run() -> Round:
        engine = VllmEngine(model=entry)
        await engine.start()
        try:
            await asyncio.gather(*(engine.complete(Request(messages=tuple(c))) for c in conversations(2)))
            began = time.monotonic()
            answers = await asyncio.gather(
                *(engine.complete(Request(messages=tuple(c), params=params)) for c in conversations(rows))
            )
            seconds = time.monotonic() - began
        finally:
            await engine.close()
        return sum(one.usage.output for one in answers if one.usage is not None), seconds

    return asyncio.run(run())


SIDES: dict[str, Callable[[str, int], Round]] = {"engine": through, "bare": bare}


def measured(side: str, folder: str, rows: int) -> Round:
    """One round of a side, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_vllm", folder, "--side", side, "--rows", str(rows)]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))}
    environment = {**os.environ, **threads}
    ran = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=900, env=environment)
    told = next(line for line in ran.stdout.splitlines() if line.startswith(TOLD))  # vLLM's processes write there too
    tokens, seconds = told.removeprefix(TOLD).split()
    return int(tokens), float(seconds)


def report(folder: str, rows: int, rounds: int) -> dict[str, int]:
    """Prints the ratio; the output tokens of a round of each side, which must be the same for it to mean anything."""
    told: dict[str, list[Round]] = {side: [] for side in SIDES}
    for at in range(rounds):
        for side in sorted(SIDES, reverse=bool(at % 2)):
            told[side].append(measured(side, folder, rows))
    engine, alone = (statistics.median(tokens / seconds for tokens, seconds in told[side]) for side in SIDES)
    print(f"vllm: {engine:.1f} tok/s by the engine, {alone:.1f} by LLM.chat: {engine / alone:.0%}")
    return {side: one[-1][0] for side, one in told.items()}


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or MODEL not in os.environ,
    reason=f"vllm is not installed, or {MODEL} names no model folder",
)
def test_the_vllm_engine_against_bare_vllm() -> None:
    tokens = report(os.environ[MODEL], rows=128, rounds=3)

    assert tokens["engine"] == tokens["bare"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=sorted(SIDES), help="one round of one side only")
    given = parser.parse_args()
    if given.side:
        tokens, seconds = SIDES[given.side](given.folder, given.rows)
        print(f"\n{TOLD}{tokens} {seconds}", flush=True)
    else:
        report(given.folder, given.rows, given.rounds)
