"""Answers held to a JSON schema while they are written, by xgrammar where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from batchmill_workers.gpu.transformers_answer import Guide


def available() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class Grammars:
    """Schemas compiled for one tokenizer; each is compiled once. ``ends`` are the tokens that end an answer."""

    def __init__(self, tokenizer: Any, *, vocabulary: int, ends: frozenset[int]) -> None:
        import xgrammar

        known = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(ends) or None
        )
        self._compiler = xgrammar.GrammarCompiler(known)
        self._vocabulary = vocabulary

    def guide(self, schema: Mapping[str, Any]) -> Callable[[], Guide]:
        """A maker of guides, one an answer. Raises RuntimeError for a schema that xgrammar cannot follow."""
        # Without free whitespace: a small model writes blanks for ever where it may.
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        return lambda: GrammarGuide(compiled, self._vocabulary)


class GrammarGuide:
    """What the schema allows next in one answer."""

    def __init__(self, compiled: Any, vocabulary: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._allowed = xgrammar.allocate_token_bitmask(1, vocabulary)

    def allow(self, logits: Any) -> None:
        import xgrammar

        if self._matcher.is_terminated() or not self._matcher.fill_next_token_bitmask(self._allowed, 0):
            return  # anything goes
        row = logits[None]
        xgrammar.apply_token_bitmask_inplace(row, self._allowed.to(logits.device))
        logits.copy_(row[0])

    def accept(self, token: int) -> bool:
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token)
        return bool(self._matcher.is_terminated())


def vocabulary_of(model: Any) -> int:
    """How many logits the model gives, which may be more than its tokenizer has tokens."""
    embeddings: torch.nn.Module = model.get_output_embeddings() or model.get_input_embeddings()
    return int(embeddings.weight.shape[0])
