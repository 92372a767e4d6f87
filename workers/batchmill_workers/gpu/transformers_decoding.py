"""The decoding loop: a batch's prompts are read at once, then each step gives every row that still runs one token.

Compared with ``generate`` rows leave when they are at their end, so that a long answer does not hold up short ones,
each row has sampling parameters and random numbers of its own, and the process can start other rows between two steps.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.transformers_answer import Answer, Decode, Prompt
from batchmill_workers.gpu.transformers_choice import Choosing
from batchmill_workers.gpu.transformers_guided import held
from batchmill_workers.gpu.transformers_work import Answered

_LEAVE_SHARE = 8  # rows that are done are taken out of the cache when they are one of so many: each time copies it


class Decoder:
    """A causal language model and how its forward pass is called."""

    def __init__(self, model: Any, *, ends: frozenset[int], pad: int, decode: Decode) -> None:
        self.model = model
        self.ends = ends
        self.pad = pad
        self.decode = decode
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"  # transformers 5.24 renamed it
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def forward(self, tokens: Any, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
        """Logits of the last position of each row, and the key-value cache after it."""
        output = self.model(
            input_ids=tokens,
            attention_mask=None if _is_state(cache) else mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: cache},
            **self._last_only,
        )
        return output.logits[:, -1], output[self._cache_name]


class DecodingRun:
    """One batch from its prompts to its last answer. Rows are padded on the left, so that all end at one position."""

    def __init__(self, decoder: Decoder, items: Sequence[Item]) -> None:
        self._decoder = decoder
        self._items = list(items)
        self._answers = [Answer(prompt=_prompt(item), ends=decoder.ends) for item in items]
        self._cache: Any = None
        prompts = [answer.prompt.tokens for answer in self._answers]
        self._tokens, self._mask = left_padded(prompts, decoder.pad, decoder.model.device)
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._choosing = self._chooses()
        self._dropped: frozenset[int] = frozenset()

    @property
    def live(self) -> Sequence[Item]:
        return [item for item, answer in zip(self._items, self._answers, strict=True) if self._runs(item, answer)]

    def drop(self, numbers: frozenset[int]) -> None:
        self._dropped |= numbers

    def step(self, answered: Answered) -> None:
        """One token more for each row. The first step reads the prompts."""
        logits, self._cache = self._decoder.forward(self._tokens, self._mask, self._positions, self._cache)
        chosen = self._choosing.choose(self._held(logits.to(self._tokens.device)))
        self._tokens = chosen[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(chosen), 1))], dim=-1)
        self._positions = self._positions[:, -1:] + 1
        tokens = chosen.tolist()  # the one time in a step that it waits for the device
        now_ns = time.monotonic_ns()
        for item, answer, token in zip(self._items, self._answers, tokens, strict=True):
            if self._runs(item, answer) and answer.add(token, now_ns, self._decoder.decode):
                answered(item, answer.fields(self._decoder.decode))
        self._leave()

    def _runs(self, item: Item, answer: Answer) -> bool:
        return answer.finish_reason is None and item.number not in self._dropped

    def _chooses(self) -> Choosing:
        return Choosing([answer.chooser for answer in self._answers], self._decoder.model.device)

    def _held(self, logits: Any) -> Any:
        """The logits without what schemas do not allow."""
        guides = {
            i: answer.guide
            for i, answer in enumerate(self._answers)
            if answer.guide is not None and answer.finish_reason is None
        }
        return held(logits, guides) if guides else logits

    def _leave(self) -> None:
        """Takes rows that are done out of the batch, once they are enough of it."""
        pairs = list(zip(self._items, self._answers, strict=True))
        keep = [i for i, pair in enumerate(pairs) if self._runs(*pair)]
        if not keep or (len(pairs) - len(keep)) * _LEAVE_SHARE < len(pairs) or not _divisible(self._cache):
            return
        index = self._tokens.new_tensor(keep)
        self._cache.batch_select_indices(index)
        self._tokens, self._mask, self._positions = (x[index] for x in (self._tokens, self._mask, self._positions))
        self._items = [self._items[i] for i in keep]
        self._answers = [self._answers[i] for i in keep]
        self._choosing = self._chooses()


def _prompt(item: Item) -> Prompt:
    assert isinstance(item.payload, Prompt)
    return item.payload


def _is_state(cache: Any) -> bool:
    """Whether it is a state alone, as Mamba's, in which padding has no place once the prompt is read."""
    linear = getattr(cache, "is_linear", ())
    return bool(linear) and all(linear)


def _divisible(cache: Any) -> bool:
    """Whether rows can be taken out of it: those that keep a state instead of keys and values cannot (Mamba, LFM2)."""
    layers = getattr(cache, "layers", None) or [cache]
    return all(hasattr(layer, "batch_select_indices") for layer in layers)


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Any, Any]:
    """Token ids and attention mask of rows that end at the same position."""
    longest = max(len(row) for row in rows)
    tokens = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)
