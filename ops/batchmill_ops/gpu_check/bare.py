"""Output tokens per second of a bare engine, without Batchmill; run in a process of its own, pinned as a worker is.

``python -m batchmill_ops.gpu_check.bare ENGINE FOLDER DEVICE ROWS MAX_TOKENS SECONDS SHAPE`` prints the figure last.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

from batchmill_workers.gpu.listing import pin_by_numbers

from .local_model import SHAPES, Shape, prompts

_POOL_BATCHES = 8


def by_transformers(folder: str, device: str, rows: int, max_tokens: int, seconds: float, shape: Shape) -> float:
    """``generate`` over batches of ``rows`` prompts sorted by length, for at least that long."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = sorted((_rendered(tokenizer, p) for p in prompts(rows * _POOL_BATCHES, shape)), key=len)

    def batch(number: int) -> int:
        start = number % _POOL_BATCHES * rows
        inputs = tokenizer(texts[start : start + rows], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**inputs.to(device), max_new_tokens=max_tokens, do_sample=False)
        return int((out.shape[1] - inputs["input_ids"].shape[1]) * out.shape[0])

    batch(0)  # warms up
    began, done, number = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds or number % _POOL_BATCHES:
        done += batch(number)
        number += 1
        if number % _POOL_BATCHES and time.monotonic() - began > 2 * seconds:
            break
    return done / (time.monotonic() - began)


def by_vllm(folder: str, _device: str, rows: int, max_tokens: int, seconds: float, shape: Shape) -> float:
    """One list of prompts, as many as fill that time."""
    pin_by_numbers(os.environ)
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(model=folder, disable_log_stats=True)
    tokenizer = engine.get_tokenizer()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=max_tokens)

    def run(count: int) -> float:
        texts = [
            {"prompt_token_ids": tokenizer.encode(_rendered(tokenizer, p), add_special_tokens=False)}
            for p in prompts(count, shape)
        ]
        began = time.monotonic()
        outputs = engine.generate(texts, sampling, use_tqdm=False)
        return float(sum(len(o.outputs[0].token_ids) for o in outputs)) / (time.monotonic() - began)

    run(rows)  # warms up
    return run(max(rows, int(run(4 * rows) * seconds / max_tokens)))


def _rendered(tokenizer: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def main(arguments: list[str]) -> None:
    engine, folder, device, rows, max_tokens, seconds, shape = arguments
    run = {"transformers": by_transformers, "vllm": by_vllm}[engine]
    sys.stdout.write(f"\n{run(folder, device, int(rows), int(max_tokens), float(seconds), SHAPES[shape])}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
