"""What batching is worth, and what the processor allows: the OpenVINO engine asked for all rows at once, and one by one.

Three data sets: short prompts with answers of 24 and of 96 tokens, and classification by instructions that all rows
share. Both sides are the same engine, in turns; no text comes twice, since its prompt would be in the cache. What bounds
a batch is multiplying matrices: how fast the engine does that here is measured in the same run, by prompts of hundreds of
tokens that are hardly answered. One row at a time is bound by reading the weights instead, so the ratio of both is the
most that batching can bring: about 5 on cores with AVX2, over 10 with AVX-512.
``python -m tests.benchmarks.bench_batched``; about six minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from batchmill_core.catalog import ModelEntry
from batchmill_core.request import Request
from batchmill_core.usage import Usage
from batchmill_workers.gpu.openvino import OpenVinoEngine
from tests.benchmarks.bench_openvino import SOURCE, prompts

# SmolLM2-135M: 30 layers, and the table of its 49152 tokens, which is used once more for each token of an answer only.
LAYER_SHAPES = ((576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576))
LAYERS_FLOP = 30 * sum(2 * a * b for a, b in LAYER_SHAPES)
TABLE_FLOP = 2 * 576 * 49152
SYSTEM_TOKENS = 32  # that the chat template begins with: they are computed once and cached
LONG_PROMPTS = 16
INSTRUCTIONS = (
    "You sort reviews of a shop for kitchen things. Positive means that the customer would buy the thing again, negative "
    "that they would not, and neutral that the review does not say. A late parcel alone makes no review negative, and a "
    "low price alone makes none positive. When a review praises one thing and complains of another, the last sentence "
    "counts. Reviews in other languages are sorted in the same way. Answer with one word, which is positive, negative or "
    "neutral, and nothing else: no sentence, no reason, no punctuation. If you are not sure, the answer is neutral. "
    "Reviews that are empty, or that are about another shop, are neutral too. The review follows.\n\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """``texts(first, rows)`` are never the same for another ``first``; ``shared`` is the text that all begin with."""

    name: str
    texts: Callable[[int, int], list[str]]
    shared: str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Output tokens per second; ``most`` is what the multiplications alone would allow."""

    together: float
    apart: float
    most: float


def reviews(first: int, rows: int) -> list[str]:
    return [f"{INSTRUCTIONS}Kettle number {first + i} leaks at the lid, but it is quiet." for i in range(rows)]


SCENARIOS = (
    Scenario(name="short prompts, 24 tokens", texts=lambda f, n: prompts(n, f), shared="", max_tokens=24),
    Scenario(name="short prompts, 96 tokens", texts=lambda f, n: prompts(n, f), shared="", max_tokens=96),
    Scenario(name="classification, shared instructions", texts=reviews, shared=INSTRUCTIONS, max_tokens=4),
)


async def flops_per_s(engine: OpenVinoEngine, first: int) -> float:
    """The best rate of multiplications that the engine reaches: prompts without a shared beginning, one token each."""
    best = 0.0
    for number in range(first, first + 3 * LONG_PROMPTS, LONG_PROMPTS):
        began = time.perf_counter()
        asked = (_usage(engine, _long_prompt(n), 1) for n in range(number, number + LONG_PROMPTS))
        usages = await asyncio.gather(*asked)
        flop = sum((usage.input - SYSTEM_TOKENS) * LAYERS_FLOP + usage.output * TABLE_FLOP for usage in usages)
        best = max(best, flop / (time.perf_counter() - began))
    return best


def _long_prompt(number: int) -> str:
    return " ".join(str(number * 31 + i * 7) for i in range(60))


async def _usage(engine: OpenVinoEngine, text: str, max_tokens: int) -> Usage:
    params = {"max_tokens": max_tokens, "temperature": 0}
    completion = await engine.complete(Request(messages=({"role": "user", "content": text},), params=params))
    assert completion.usage is not None
    return completion.usage


async def one_round(engine: OpenVinoEngine, scenario: Scenario, rows: int, first: int) -> Rates:
    """All rows at once, the peak of the engine, then an eighth of as many other rows one by one."""
    shared = (await _usage(engine, scenario.shared, 1)).input
    began = time.perf_counter()
    texts = scenario.texts(first, rows)
    together = await asyncio.gather(*(_usage(engine, text, scenario.max_tokens) for text in texts))
    together_s = time.perf_counter() - began
    peak = await flops_per_s(engine, first + rows)
    began = time.perf_counter()
    apart = [await _usage(engine, text, scenario.max_tokens) for text in scenario.texts(first + rows, rows // 8)]
    apart_s = time.perf_counter() - began
    output = sum(usage.output for usage in together)
    computed = sum(usage.input - shared for usage in together) + output
    return Rates(
        together=output / together_s,
        apart=sum(usage.output for usage in apart) / apart_s,
        most=output * peak / (computed * LAYERS_FLOP + output * TABLE_FLOP),
    )


async def measure(rows: int, rounds: int) -> dict[str, list[Rates]]:
    engine = OpenVinoEngine(model=ModelEntry(name="smollm2", engine="openvino", source=SOURCE))
    await engine.start()
    measured: dict[str, list[Rates]] = {scenario.name: [] for scenario in SCENARIOS}
    try:
        for number in range(rounds):
            for at, scenario in enumerate(SCENARIOS):
                first = 10_000 + (number * len(SCENARIOS) + at) * 2 * rows
                measured[scenario.name].append(await one_round(engine, scenario, rows, first))
    finally:
        await engine.close()
    return measured


def told(name: str, rates: list[Rates]) -> str:
    """Medians, and what they mean for the goal, in one line."""
    together, apart, most = (statistics.median(getattr(one, field) for one in rates) for field in Rates.__slots__)
    possible = most / apart
    return (
        f"batching (cpu), {name}: {together:.0f} tok/s at once, {apart:.0f} one by one: {together / apart:.1f}x. "
        f"Multiplying alone would allow {most:.0f} tok/s, {possible:.1f}x, of which we reach {together / most:.0%}"
    )


def report(rows: int, rounds: int) -> None:
    for name, rates in asyncio.run(measure(rows, rounds)).items():
        print(told(name, rates))


def test_batching_is_worth_it() -> None:
    report(rows=128, rounds=3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    report(given.rows, given.rounds)
