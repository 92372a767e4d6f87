"""Choosing the next token of every row of a batch, each by its own sampling parameters and its own random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from batchmill_workers.gpu.transformers_penalties import Penalties

NO_TOKEN = -1
_ALL = 1 << 30  # more than any vocabulary has tokens
_LIKELIEST = 1024  # tokens that are looked at first for top-p


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one row's tokens are chosen. ``temperature`` 0 takes the likeliest; ``top_k`` 0 and the others' neutral
    values leave all tokens in. ``seed`` None takes another one each time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None

    @classmethod
    def of(cls, sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> Choice:
        """What a request gave (``Sampling.as_dict``), else what the model's generation settings say.

        A given temperature decides whether to sample. Without one the model's ``do_sample`` does, or a parameter that
        means nothing else.
        """
        given = {name: value for name, value in sampling.items() if value is not None}
        names = ("top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        known = {n: given.get(n, defaults.get(n)) for n in names}
        samples = defaults.get("do_sample") or not given.keys().isdisjoint({"top_p", "top_k", "min_p"})
        usual = (defaults.get("temperature") or 1.0) if samples else 0.0
        chosen = {n: v for n, v in known.items() if v is not None}
        chosen["top_k"] = max(0, chosen.get("top_k", 0))
        return cls(temperature=given.get("temperature", usual), seed=given.get("seed"), **chosen)

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """One row's choice, the tokens it has so far, and random numbers of its own: a seed gives one answer whatever else
    runs.
    """

    choice: Choice
    prompt: Sequence[int]
    answer: Sequence[int]
    random: random.Random


class Choosing:
    """The rows of one batch. What they were asked lies on the device, and no row is handled by itself there: a step
    takes as many calls of the device for many rows as for few, and waits for none of them.
    """

    def __init__(self, rows: Sequence[Chooser], device: Any) -> None:
        self._rows = list(rows)
        self._groups = _groups(self._rows, device)
        self._penalties: Penalties | None = None
        self._penalized = [i for i, row in enumerate(self._rows) if row.choice.penalizes]

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token of each row of ``logits`` (rows, vocabulary), on their device.

        Order as in Hugging Face's and vLLM's samplers: penalties, temperature, top-k, top-p, min-p. For a row that
        penalizes, its tokens count as said in its answer from then on. A row whose logits are no numbers, or which may
        say nothing, gets ``NO_TOKEN``: whatever was chosen for it would be no answer of the model's.
        """
        logits = logits.float()
        can_choose = logits.amax(dim=-1).isfinite()  # NaN is the highest of all, and without any token -inf is
        if self._penalized:
            if self._penalties is None:
                self._penalties = Penalties(self._rows, self._penalized, logits)
            logits = self._penalties.of(logits)
        tokens = self._tokens(logits)
        if self._penalties is not None:
            self._penalties.note(tokens)
        return tokens.masked_fill(~can_choose, NO_TOKEN)

    def _tokens(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self._groups) == 1 and self._groups[0].index is None:
            (group,) = self._groups
            return group.draw(logits, moved(self._numbers(group), logits.device))
        tokens = logits.argmax(dim=-1)
        if self._groups:
            numbers = moved([one for group in self._groups for one in self._numbers(group)], logits.device)
            parts = numbers.split([len(group.rows) for group in self._groups])
            for group, part in zip(self._groups, parts, strict=True):
                tokens[group.index] = group.draw(logits[group.index], part)
        return tokens

    def _numbers(self, group: _Group) -> list[float]:
        return [self._rows[i].random.random() for i in group.rows]


def moved(values: Sequence[float], device: Any) -> torch.Tensor:
    """A row of numbers on the device, without waiting for what it computes just now."""
    made = torch.tensor(values, dtype=torch.float32)
    return made if made.device == device else made.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows that draw in the same way: from the whole vocabulary as it lies there, or sorted from the likeliest on, of
    which ``most`` are enough for their top-k (0: they have none).

    ``index`` None: they are all rows of the batch. Which rows are in a group changes nothing for one of them.
    """

    rows: Sequence[int]
    index: torch.Tensor | None
    sorts: bool
    most: int
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def draw(self, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """One token per row, by inverting the cumulated probabilities of what top-k, top-p and min-p leave."""
        scaled = logits / self.temperature
        if not self.sorts:
            likely = scaled.softmax(dim=-1)
            return _inverted(likely.masked_fill(likely < likely.amax(-1, keepdim=True) * self.min_p, 0.0), numbers)
        likely, tokens = self._of_top_k(scaled) if self.most else self._of_top_p(scaled.softmax(dim=-1))
        keeps = likely.cumsum(dim=-1) - likely < self.top_p
        keeps &= likely >= likely[:, :1] * self.min_p
        keeps[:, 0] = True
        drawn = _inverted(likely.masked_fill(~keeps, 0.0), numbers)
        return tokens.gather(1, drawn[:, None])[:, 0]

    def _of_top_k(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ordered, tokens = scaled.topk(min(self.most, scaled.shape[-1]), dim=-1)
        rank = torch.arange(ordered.shape[-1], device=scaled.device)[None]
        return ordered.masked_fill(rank >= self.top_k, float("-inf")).softmax(dim=-1), tokens

    def _of_top_p(self, likely: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sorting a whole vocabulary is the dearest step of all, and hardly ever needed: the likeliest tokens mostly
        hold all that top-p leaves.
        """
        first, tokens = likely.topk(min(_LIKELIEST, likely.shape[-1]), dim=-1)
        if first.shape[-1] < likely.shape[-1] and bool((first.sum(dim=-1, keepdim=True) < self.top_p).any()):
            first, tokens = likely.sort(dim=-1, descending=True, stable=True)
        return first, tokens


def _inverted(likely: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where each row's cumulated weights pass its number's share of them; never at a weight of nothing."""
    total = likely.cumsum(dim=-1)
    at = total[:, -1:] * numbers[:, None]
    drawn = torch.searchsorted(total, at, right=True).clamp(max=likely.shape[-1] - 1)
    return torch.where(likely.gather(1, drawn) > 0, drawn, likely.argmax(dim=-1, keepdim=True))[:, 0]


def _groups(rows: Sequence[Chooser], device: Any) -> list[_Group]:
    sampled = [i for i, row in enumerate(rows) if row.choice.temperature > 0]
    kinds: dict[str, list[int]] = {}
    for i in sampled:
        choice = rows[i].choice
        kinds.setdefault("top_k" if choice.top_k else "top_p" if choice.top_p < 1 else "all", []).append(i)
    return [_group(kind, members, rows, device) for kind, members in kinds.items()]


def _group(kind: str, members: Sequence[int], rows: Sequence[Chooser], device: Any) -> _Group:
    choices = [rows[i].choice for i in members]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32)[:, None]

    return _Group(
        rows=members,
        index=None if len(members) == len(rows) else torch.tensor(members, device=device),
        sorts=kind != "all",
        most=max(one.top_k for one in choices),
        temperature=column([max(one.temperature, 1e-4) for one in choices]),
        top_k=column([one.top_k or _ALL for one in choices]),
        top_p=column([one.top_p for one in choices]),
        min_p=column([one.min_p for one in choices]),
    )
