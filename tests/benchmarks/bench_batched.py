"""What batching is worth: the OpenVINO engine asked for all rows at once, against one row after the other.

Both sides are the same engine with the same rows, in turns. ``python -m tests.benchmarks.bench_batched``; about two
minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from batchmill_core.catalog import ModelEntry
from batchmill_core.request import Request
from batchmill_workers.gpu.openvino import OpenVinoEngine
from tests.benchmarks.bench_openvino import SOURCE, engine_round, prompts

MAX_TOKENS = 24


async def one_by_one(engine: OpenVinoEngine, texts: list[str]) -> float:
    """Output tokens per second of rows that wait for each other."""
    params = {"max_tokens": MAX_TOKENS, "temperature": 0}
    began, tokens = time.perf_counter(), 0
    for text in texts:
        completion = await engine.complete(Request(messages=({"role": "user", "content": text},), params=params))
        assert completion.usage is not None
        tokens += completion.usage.output
    return tokens / (time.perf_counter() - began)


async def measure(rows: int, rounds: int) -> tuple[float, float]:
    """Medians of output tokens per second: batched, and one by one over an eighth of the rows."""
    engine = OpenVinoEngine(model=ModelEntry(name="smollm2", engine="openvino", source=SOURCE))
    await engine.start()
    texts = prompts(rows)
    together, apart = [], []
    try:
        await engine_round(engine, texts[:8], 4)
        for _ in range(rounds):
            together.append((await engine_round(engine, texts, MAX_TOKENS))[0])
            apart.append(await one_by_one(engine, texts[:: max(1, rows // 16)]))
    finally:
        await engine.close()
    return statistics.median(together), statistics.median(apart)


def report(rows: int, rounds: int) -> float:
    together, apart = asyncio.run(measure(rows, rounds))
    print(
        f"batching (cpu): {together:.0f} tok/s with {rows} rows at once, {apart:.0f} one by one: {together / apart:.1f}x"
    )
    return together / apart


def test_batching_is_worth_it() -> None:
    report(rows=128, rounds=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    report(given.rows, given.rounds)
