"""Embeddings by sentence-transformers: the model's own pooling and normalisation, or mean pooling where it has none."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers_loading import attention, device_map, precision
from batchmill_workers.gpu.transformers_once import OnceRun, padded, read_texts
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_work import Piece


class Embedder:
    """A loaded embedding model. A text gets the model's default prompt, if its configuration names one."""

    task = "embed"

    def __init__(self, model: Any, *, context_tokens: int | None, truncate: bool) -> None:
        self.model = model
        self.context_tokens = context_tokens
        self._truncate = truncate
        self._prompt = (model.prompts or {}).get(model.default_prompt_name) or ""

    def read(self, frame: Frame) -> list[Piece]:
        texts = [self._prompt + text for text in frame["inputs"]]
        return read_texts(self.model.tokenizer, texts, context=self.context_tokens, truncate=self._truncate)

    def begin(self, items: Sequence[Item]) -> OnceRun:
        return OnceRun(items, self._vectors)

    def merge(self, parts: Sequence[Frame]) -> Frame:
        return {"vectors": [part["vector"] for part in parts]}

    def _vectors(self, items: Sequence[Item]) -> list[Frame]:
        features = padded(self.model.tokenizer, items, self.model.device)
        vectors = self.model(features)["sentence_embedding"].float().cpu().numpy()
        return [{"vector": base64.b64encode(one.astype("<f4").tobytes()).decode()} for one in vectors]


def load_embedder(path: Path, device: str, options: TransformersOptions, context_tokens: int | None) -> Embedder:
    """Raises what loading raises; of a folder of sentence-transformers its modules are used."""
    placed = device_map(device)
    model = SentenceTransformer(
        str(path),
        device=device,
        local_files_only=True,
        trust_remote_code=options.trust_remote_code,
        model_kwargs={
            "dtype": precision(options.dtype, device),
            **attention(options),
            **({"device_map": placed} if placed == "auto" else {}),
        },
    ).eval()
    own = model.get_max_seq_length()
    known = [one for one in (context_tokens, own) if one]
    return Embedder(model, context_tokens=min(known, default=None), truncate=options.truncate)
