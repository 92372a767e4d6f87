"""Answers held to a JSON schema while they are written, by xgrammar where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from batchmill_workers.gpu.transformers_answer import Guide

_BITS = 32  # tokens in a number of the table


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

    def guide(self, schema: Mapping[str, Any]) -> Callable[[], Guide]:
        """A maker of guides, one an answer. Raises RuntimeError for a schema that xgrammar cannot follow."""
        # Without free whitespace: a small model writes blanks for ever where it may.
        compiled = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        return lambda: GrammarGuide(compiled)


class GrammarGuide:
    """What the schema allows next in one answer."""

    def __init__(self, compiled: Any) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)

    def fill(self, allowed: Any, row: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.fill_next_token_bitmask(allowed, row))

    def accept(self, token: int) -> bool:
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token)
        return bool(self._matcher.is_terminated())


def held(logits: torch.Tensor, guides: Mapping[int, Guide]) -> torch.Tensor:
    """The logits of a batch without the tokens that its rows' guides do not allow; ``guides`` are those of some rows.

    However many rows are guided, one table goes to the device and is applied there at once.
    """
    rows, vocabulary = logits.shape
    allowed = torch.full((rows, -(-vocabulary // _BITS)), -1, dtype=torch.int32)  # as xgrammar allocates it
    holds = [guide.fill(allowed, row) for row, guide in guides.items()]
    if not any(holds):
        return logits
    if logits.device.type == "cpu":
        return _held_by_xgrammar(logits, allowed)
    return held_by_table(logits, allowed.pin_memory().to(logits.device, non_blocking=True))


def _held_by_xgrammar(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    import xgrammar

    kept = logits.float().contiguous()  # a step's logits are of no more use to the model
    xgrammar.apply_token_bitmask_inplace(kept, allowed)
    return kept


def held_by_table(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """By torch alone: xgrammar's own way on a GPU compiles itself there, for which a host needs a C compiler."""
    bits = torch.arange(_BITS, device=logits.device, dtype=torch.int32)
    allows = (allowed[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[-1]]
    return logits.masked_fill(allows == 0, float("-inf"))


def vocabulary_of(model: Any) -> int:
    """How many logits the model gives, which may be more than its tokenizer has tokens."""
    embeddings: torch.nn.Module = model.get_output_embeddings() or model.get_input_embeddings()
    return int(embeddings.weight.shape[0])
