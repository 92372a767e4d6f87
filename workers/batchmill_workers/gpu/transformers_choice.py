"""Choosing the next token of every row of a batch, each by its own sampling parameters and its own random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


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


def choose(logits: torch.Tensor, rows: Sequence[Chooser]) -> list[int]:
    """The next token of each row of ``logits`` (rows, vocabulary).

    Order as in Hugging Face's and vLLM's samplers: penalties, temperature, top-k, top-p, min-p.
    """
    logits = logits.float()
    if any(row.choice.penalizes for row in rows):
        logits = logits.clone()
        for i, row in enumerate(rows):
            if row.choice.penalizes:
                _penalize(logits[i], row)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    sampled = [i for i, row in enumerate(rows) if row.choice.temperature > 0]
    if sampled:
        drawn = _draw(logits[sampled] if len(sampled) < len(rows) else logits, [rows[i] for i in sampled])
        for i, token in zip(sampled, drawn, strict=True):
            tokens[i] = token
    return tokens


def _penalize(logits: torch.Tensor, row: Chooser) -> None:
    """In place. Repetition as in the CTRL paper (arXiv:1909.05858), over prompt and answer; the others as OpenAI's."""
    choice = row.choice
    if choice.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * choice.repetition_penalty, values / choice.repetition_penalty)
    if row.answer and (choice.frequency_penalty or choice.presence_penalty):
        tokens, counts = torch.tensor(row.answer, device=logits.device).unique(return_counts=True)
        logits[tokens] -= choice.frequency_penalty * counts + choice.presence_penalty


def _draw(logits: torch.Tensor, rows: Sequence[Chooser]) -> list[int]:
    """One token per row, by inverting the cumulated probabilities of what top-k, top-p and min-p leave."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]

    choices = [row.choice for row in rows]
    scaled = logits / column([max(one.temperature, 1e-4) for one in choices])
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)[None]
    ordered = ordered.masked_fill(rank >= column([one.top_k or ordered.shape[-1] for one in choices]), float("-inf"))
    likely = ordered.softmax(dim=-1)
    before = likely.cumsum(dim=-1) - likely
    keeps = before < column([one.top_p for one in choices])
    keeps &= likely >= likely[:, :1] * column([one.min_p for one in choices])
    keeps[:, 0] = True
    total = likely.masked_fill(~keeps, 0.0).cumsum(dim=-1)
    at = total[:, -1:] * column([row.random.random() for row in rows])
    drawn = torch.minimum((total <= at).sum(dim=-1, keepdim=True), keeps.sum(dim=-1, keepdim=True) - 1)
    return [int(token) for token in tokens.gather(1, drawn)[:, 0].tolist()]
