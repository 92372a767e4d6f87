"""What embedding and classifying share: texts read into token ids, and batches that are answered in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from batchmill_core.errors import TooLong
from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers_work import Answered, Piece

Compute = Callable[[Sequence[Item]], Sequence[Frame]]


class OnceRun:
    """A batch that is answered by one pass through the model."""

    def __init__(self, items: Sequence[Item], compute: Compute) -> None:
        self._items = list(items)
        self._compute = compute

    @property
    def live(self) -> Sequence[Item]:
        return self._items

    def drop(self, numbers: frozenset[int]) -> None:
        self._items = [item for item in self._items if item.number not in numbers]

    def step(self, answered: Answered) -> None:
        items = self._items
        fields = self._compute(items)
        self._items = []
        for item, one in zip(items, fields, strict=True):
            answered(item, one)


def read_texts(tokenizer: Any, texts: Sequence[str], *, context: int | None, truncate: bool) -> list[Piece]:
    """Token ids of each text with the model's special tokens, and without padding.

    Raises TooLong for a text of more tokens than ``context``, unless it is to be truncated.
    """
    cut = {"truncation": True, "max_length": context} if truncate and context is not None else {"truncation": False}
    rows = tokenizer(list(texts), padding=False, verbose=False, **cut)["input_ids"]
    for i, row in enumerate(rows):
        if context is not None and len(row) > context:
            which = f" (number {i + 1} of {len(rows)} in its call)" if len(rows) > 1 else ""
            raise TooLong(
                f"a text of {len(row)} tokens{which} does not fit the model's {context}; "
                "shorten it, or let it be cut by options.truncate = true"
            )
    return [Piece(tokens=len(row), payload=row) for row in rows]


def padded(tokenizer: Any, items: Sequence[Item], device: Any) -> dict[str, Any]:
    """The rows' token ids and attention mask as tensors, padded on the side that the model was made for."""
    features = tokenizer.pad({"input_ids": [item.payload for item in items]}, padding=True, return_tensors="pt")
    return {name: tensor.to(device) for name, tensor in features.items()}
