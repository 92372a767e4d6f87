"""Models of the transformers engine loaded and asked in a test's own process, which is quicker than through the engine."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.sampling import Sampling
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_process import load_work


def loaded(folder: Path, *, context_tokens: int | None = None, **options: Any) -> Any:
    """The model as the engine's process loads it."""
    return load_work(folder, "cpu", TransformersOptions(**options), context_tokens)


def computed(work: Any, *frames: Frame) -> list[Frame]:
    """What calls come to whose texts run in one batch."""
    pieces = [(call, piece) for call, frame in enumerate(frames) for piece in work.read(frame)]
    items = [
        Item(number=n, tokens=piece.tokens, wanted=piece.wanted, arrived_ns=0, payload=piece.payload)
        for n, (_, piece) in enumerate(pieces)
    ]
    parts: dict[int, Frame] = {}
    run = work.begin(items)
    with torch.inference_mode():
        while run.live:
            run.step(lambda item, fields: parts.update({item.number: fields}))
    return [_end(work, [parts[n] for n, (c, _) in enumerate(pieces) if c == call]) for call in range(len(frames))]


def _end(work: Any, parts: list[Frame]) -> Frame:
    """The last message of a call, as `transformers_calls.Calls` makes it."""
    return next((part for part in parts if "error" in part), None) or work.merge(parts)


def asking(text: str, **sampling: Any) -> Frame:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "sampling": Sampling(**sampling).as_dict(), "schema": None}


def floats(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)
