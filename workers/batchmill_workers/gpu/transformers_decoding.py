"""The decoding loop: a batch's prompts are read at once, then each step gives every row that still runs one token.

Compared with ``generate`` rows leave when they are at their end, so that a long answer does not hold up short ones,
each row has sampling parameters and random numbers of its own, and the process can start other rows between two steps.

On a GPU a step is told its tokens by the step before: while the device computes the next ones, Python looks at the last,
so that the device never waits for a loop over rows. A row that has ended is computed once more in vain.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.transformers_answer import Answer, Decode, Prompt
from batchmill_workers.gpu.transformers_choice import NO_TOKEN, Choosing
from batchmill_workers.gpu.transformers_guided import held
from batchmill_workers.gpu.transformers_work import Answered, broken

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # since transformers 5.24; before; of Mamba before
_LEAVE_SHARE = 8  # rows that are done are taken out of the cache when they are one of so many: each time copies it


class Decoder:
    """A causal language model and how its forward pass is called."""

    def __init__(self, model: Any, *, ends: frozenset[int], pad: int, decode: Decode) -> None:
        self.model = model
        self.ends = ends
        self.pad = pad
        self.decode = decode
        known = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in known), _CACHE_NAMES[1])
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self.ahead = model.device.type == "cuda"  # a processor would only compute what is not needed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A step's tokens on their way from the device, and the rows that they are of."""

    host: Any
    copied: Any  # the event of the copy's end; None where it has ended
    rows: list[tuple[Item, Answer]]

    @classmethod
    def of(cls, chosen: Any, rows: list[tuple[Item, Answer]]) -> _Chosen:
        if chosen.device.type != "cuda":
            return cls(host=chosen, copied=None, rows=rows)
        host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(chosen.device))
        return cls(host=host, copied=copied, rows=rows)

    def tokens(self) -> list[int]:
        """The one time in a step that Python waits for the device."""
        if self.copied is not None:
            self.copied.synchronize()
        found: list[int] = self.host.tolist()
        return found


class DecodingRun:
    """One batch from its prompts to its last answer. Rows are padded on the left, so that all end at one position."""

    def __init__(self, decoder: Decoder, items: Sequence[Item]) -> None:
        self._decoder = decoder
        self._items = list(items)
        prompts = [_prompt(item) for item in items]
        self._answers = [Answer(prompt=one, ends=decoder.ends | one.ends) for one in prompts]
        self._cache: Any = None
        self._tokens, self._mask = left_padded([one.tokens for one in prompts], decoder.pad, decoder.model.device)
        self._positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._choosing = self._chooses()
        self._dropped: frozenset[int] = frozenset()
        self._pending: _Chosen | None = None
        guided = any(answer.guide is not None for answer in self._answers)  # a guide must know the last token first
        self._ahead = decoder.ahead and not guided

    @property
    def live(self) -> Sequence[Item]:
        return [item for item, answer in zip(self._items, self._answers, strict=True) if self._runs(item, answer)]

    def drop(self, numbers: frozenset[int]) -> None:
        self._dropped |= numbers

    def step(self, answered: Answered) -> None:
        """One token more for each row. The first step reads the prompts."""
        told, self._pending = self._pending, None
        if told is None or not self._ends_with(told):
            self._pending = self._compute()
            if not self._ahead:
                told, self._pending = self._pending, None
        if told is not None:
            self._tell(told, answered)
            self._leave()

    def _compute(self) -> _Chosen:
        logits, self._cache = self._decoder.forward(self._tokens, self._mask, self._positions, self._cache)
        chosen = self._choosing.choose(self._held(logits.to(self._tokens.device)))
        self._tokens = chosen.clamp(min=0)[:, None]  # what a row without a token reads next does not matter
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(chosen), 1))], dim=-1)
        self._positions = self._positions[:, -1:] + 1
        return _Chosen.of(chosen, list(zip(self._items, self._answers, strict=True)))

    def _ends_with(self, told: _Chosen) -> bool:
        """Whether these tokens are the last that any row may have, so that a step more would be for nothing."""
        return all(len(a.tokens) + 1 >= a.prompt.max_tokens for i, a in told.rows if self._runs(i, a))

    def _tell(self, told: _Chosen, answered: Answered) -> None:
        tokens, now_ns = told.tokens(), time.monotonic_ns()
        for (item, answer), token in zip(told.rows, tokens, strict=True):
            if not self._runs(item, answer):
                continue
            if token == NO_TOKEN:
                answer.finish_reason = "error"
                answered(item, broken(answer.without_token()))
            elif answer.add(token, now_ns, self._decoder.decode):
                answered(item, answer.fields(self._decoder.decode))

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
    tokens = numpy.full((len(rows), longest), pad, dtype=numpy.int64)
    for one, row in zip(tokens, rows, strict=True):
        one[longest - len(row) :] = row
    starts = numpy.array([longest - len(row) for row in rows])
    mask = (numpy.arange(longest) >= starts[:, None]).astype(numpy.int64)
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)
