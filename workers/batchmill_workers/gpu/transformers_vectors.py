"""Embeddings by sentence-transformers: the model's own pooling and normalisation, or mean pooling where it has none."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from sentence_transformers import SentenceTransformer

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers_lengths import learned_positions, least_length
from batchmill_workers.gpu.transformers_loading import (
    attention,
    check_tokenizer,
    device_map,
    known_tokens,
    precision,
    settle_padding,
)
from batchmill_workers.gpu.transformers_once import NOT_FINITE, OnceRun, TokensOf, padded, plain_tokens, read_texts
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_work import Piece, broken, refused

_ROUNDING = 0.01  # of bfloat16, which has two decimal digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to embed; of its vector the first ``dimensions`` are wanted (None: all)."""

    tokens: list[int]
    dimensions: int | None


class Embedder:
    """A loaded embedding model. A text gets the model's default prompt, if its configuration names one.

    ``renders``: texts are put into the model's chat template, as sentence-transformers saved it.
    """

    task = "embed"

    def __init__(self, model: Any, *, context_tokens: int | None, truncate: bool, renders: bool = False) -> None:
        self.model = model
        self.context_tokens = context_tokens
        self._truncate = truncate
        self._prompt = (model.prompts or {}).get(model.default_prompt_name) or ""
        self._renders = renders
        self._features: dict[str, Any] = {}
        if self._prompt and not renders:
            self._features["prompt_length"] = _length(model.tokenizer, self._prompt)
        self._known = known_tokens(model[0].auto_model)

    def read(self, frame: Frame) -> list[Piece]:
        tokens_of: TokensOf = self._rendered if self._renders else plain_tokens(self.model.tokenizer)
        texts = frame["inputs"] if self._renders else [self._prompt + text for text in frame["inputs"]]
        pieces = read_texts(tokens_of, texts, context=self.context_tokens, truncate=self._truncate, known=self._known)
        wanted = frame.get("dimensions")
        return [replace(piece, payload=Text(tokens=piece.payload, dimensions=wanted)) for piece in pieces]

    def begin(self, items: Sequence[Item]) -> OnceRun:
        return OnceRun(items, self._vectors)

    def merge(self, parts: Sequence[Frame]) -> Frame:
        return {"vectors": [part["vector"] for part in parts]}

    def _rendered(self, texts: Sequence[str], **cut: Any) -> list[list[int]]:
        """As sentence-transformers reads texts for a model with a chat template: each as a user's message."""

        def read(text: str) -> list[int]:
            features = self.model.preprocess([text], prompt=self._prompt or None, processing_kwargs={"text": cut})
            tokens: list[int] = features["input_ids"][0].tolist()
            return tokens

        return [read(text) for text in texts]

    def _vectors(self, items: Sequence[Item]) -> list[Frame]:
        features = padded(self.model.tokenizer, [item.payload.tokens for item in items], self.model.device)
        vectors = self.model(features | self._features)["sentence_embedding"].float().cpu().numpy()
        return [_part(vector, item.payload.dimensions) for item, vector in zip(items, vectors, strict=True)]


def _part(vector: Any, dimensions: int | None) -> Frame:
    if not numpy.isfinite(vector).all():
        return broken(NOT_FINITE)
    if dimensions is not None:
        if dimensions > len(vector):
            return refused(f"dimensions is {dimensions}, but the model's vectors have {len(vector)}")
        vector = shortened(vector, dimensions)
    return {"vector": base64.b64encode(vector.astype("<f4").tobytes()).decode()}


def shortened(vector: Any, dimensions: int) -> Any:
    """The first dimensions of a vector of a model that was trained for it; of length 1 again, if it was.

    Source: A. Kusupati et al., Matryoshka Representation Learning, 2022, arXiv:2205.13147.
    """
    first = vector[:dimensions]
    length = numpy.linalg.norm(first)
    was_one = abs(numpy.linalg.norm(vector) - 1) < _ROUNDING
    return first / length if was_one and length > 0 else first


def _length(tokenizer: Any, prompt: str) -> int:
    """Tokens of a prompt before a text, the one that ends a text left out: some models pool the text's alone."""
    tokens = tokenizer(prompt, verbose=False)["input_ids"]
    return len(tokens) - (tokens[-1] in tokenizer.all_special_ids)


def load_embedder(path: Path, device: str, options: TransformersOptions, context_tokens: int | None) -> Embedder:
    """Raises ValueError or what loading raises; of a folder of sentence-transformers its modules are used."""
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
    inner = getattr(model[0], "auto_model", None)
    if inner is None:
        raise ValueError(
            f"its first module is a {type(model[0]).__name__}; the transformers engine embeds by models that begin with a "
            "Transformer"
        )
    check_tokenizer(model.tokenizer)
    settle_padding(model.tokenizer, inner)
    context = least_length(context_tokens, model.get_max_seq_length(), learned_positions(inner))
    # A plain encoder's chat template is for its next of kin that chat: it embeds texts as they are.
    renders = (path / "modules.json").exists() and "message" in getattr(model[0], "modality_config", ())
    return Embedder(model, context_tokens=context, truncate=options.truncate, renders=renders)
