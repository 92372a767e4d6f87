"""Penalties on tokens that a row has already, for all rows of a batch at once and without asking the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from batchmill_workers.gpu.transformers_choice import Chooser


class Penalties:
    """Of those rows of a batch that have any (``which``). Holds on the device what they have said so far.

    Repetition as in the CTRL paper (arXiv:1909.05858), over prompt and answer; frequency and presence as OpenAI's, over
    the answer.
    """

    def __init__(self, rows: Sequence[Chooser], which: Sequence[int], logits: torch.Tensor) -> None:
        chosen = [rows[i] for i in which]
        self._index = torch.tensor(which, device=logits.device)
        self._said = _counted([row.answer for row in chosen], logits)
        self._has = _counted([[*row.prompt, *row.answer] for row in chosen], logits) > 0
        self._tokens = _side_by_side([sorted({*row.prompt, *row.answer}) for row in chosen], logits.device)

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, device=logits.device, dtype=torch.float32)[:, None]

        self._repetition = column([row.choice.repetition_penalty for row in chosen])
        self._frequency = column([row.choice.frequency_penalty for row in chosen])
        self._presence = column([row.choice.presence_penalty for row in chosen])

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with the penalties; those given stay as they are."""
        penalized = logits[self._index]
        old, said = penalized.gather(1, self._tokens), self._said.gather(1, self._tokens)
        again = torch.where(old < 0, old * self._repetition, old / self._repetition)
        new = torch.where(self._has.gather(1, self._tokens), again, old)
        new -= self._frequency * said + self._presence * (said > 0)
        # A token that stands twice in a row's tokens is given the same value twice.
        return logits.index_copy(0, self._index, penalized.scatter(1, self._tokens, new))

    def note(self, tokens: torch.Tensor) -> None:
        """Each row of the batch says this token."""
        own = tokens[self._index][:, None]
        self._said.scatter_add_(1, own, torch.ones_like(own, dtype=self._said.dtype))
        self._has.scatter_(1, own, True)
        self._tokens = torch.cat([self._tokens, own], dim=1)


def _counted(rows: Sequence[Iterable[int]], logits: torch.Tensor) -> torch.Tensor:
    """How often each row has each token of the vocabulary."""
    vocabulary, device = logits.shape[-1], logits.device
    places = torch.tensor([i * vocabulary + token for i, row in enumerate(rows) for token in row], dtype=torch.int64)
    counts = torch.zeros(len(rows) * vocabulary, device=device, dtype=torch.int32)
    at = places.to(device)
    return counts.scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32)).view(len(rows), vocabulary)


def _side_by_side(rows: Sequence[Sequence[int]], device: Any) -> torch.Tensor:
    """Rows filled up to one length by token 0, which is none of theirs unless they have it."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device, dtype=torch.int64)
