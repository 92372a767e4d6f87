"""Text classification: a score for each of the model's labels."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers_lengths import learned_positions, least_length
from batchmill_workers.gpu.transformers_loading import (
    known_tokens,
    load_model,
    load_tokenizer,
    settle_padding,
)
from batchmill_workers.gpu.transformers_once import NOT_FINITE, OnceRun, padded, plain_tokens, read_texts
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_work import Piece, broken


class Classifier:
    """A loaded classification model."""

    task = "classify"

    def __init__(self, model: Any, tokenizer: Any, *, context_tokens: int | None, truncate: bool) -> None:
        self.model = model
        self.context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._truncate = truncate
        self._known = known_tokens(model)

    def read(self, frame: Frame) -> list[Piece]:
        return read_texts(
            plain_tokens(self._tokenizer),
            frame["inputs"],
            context=self.context_tokens,
            truncate=self._truncate,
            known=self._known,
        )

    def begin(self, items: Sequence[Item]) -> OnceRun:
        return OnceRun(items, self._labels)

    def merge(self, parts: Sequence[Frame]) -> Frame:
        return parts[0]

    def _labels(self, items: Sequence[Item]) -> list[Frame]:
        features = padded(self._tokenizer, [item.payload for item in items], self.model.device)
        logits = self.model(**features).logits.float()
        rows = scores_of(logits, self.model.config).tolist()
        return [self._label(row) for row in rows]

    def _label(self, scores: list[float]) -> Frame:
        if not all(map(math.isfinite, scores)):
            return broken(NOT_FINITE)
        return {"text": labelled(scores, self.model.config.id2label), "finish_reason": "stop"}


def scores_of(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Scores as transformers' text-classification pipeline gives them: they sum to 1 unless labels exclude none."""
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return logits
    if kind == "multi_label_classification" or config.num_labels == 1:
        return logits.sigmoid()
    return logits.softmax(dim=-1)


def labelled(scores: Sequence[float], names: dict[int, str]) -> str:
    """The answer as JSON: the best label, its score, and the scores of all labels, the best first."""
    ordered = sorted(enumerate(scores), key=lambda pair: (-pair[1], pair[0]))
    ranked: dict[str, float] = {}
    for i, score in ordered:
        ranked.setdefault(str(names.get(i, f"LABEL_{i}")), score)  # of two labels with one name the better score
    label = next(iter(ranked))
    return json.dumps({"label": label, "score": ranked[label], "scores": ranked}, ensure_ascii=False)


def load_classifier(path: Path, device: str, options: TransformersOptions, context_tokens: int | None) -> Classifier:
    """Raises what loading raises."""
    tokenizer = load_tokenizer(path, options)
    model = load_model(transformers.AutoModelForSequenceClassification, path, device, options)
    pad = settle_padding(tokenizer, model)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad  # decoder models look for the last token that is not padding
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = least_length(context_tokens, longest, tokenizer.model_max_length, learned_positions(model))
    return Classifier(model, tokenizer, context_tokens=context, truncate=options.truncate)
