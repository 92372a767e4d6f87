"""What embedding and classifying share: texts read into token ids, and batches that are answered in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from batchmill_core.errors import InvalidRequest, TooLong
from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers_loading import check_known
from batchmill_workers.gpu.transformers_work import Answered, Piece

NOT_FINITE = (
    "what the model computed is not finite: its weights are broken, or it overflows in its dtype "
    "(try options.dtype = float32)"
)
TokensOf = Callable[..., Sequence[list[int]]]
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


def read_texts(
    tokens_of: TokensOf, texts: Sequence[str], *, context: int | None, truncate: bool, known: int | None
) -> list[Piece]:
    """Token ids of each text as ``tokens_of`` gives them, which takes a tokenizer's settings on truncation.

    Raises TooLong for a text of more tokens than ``context``, unless it is to be truncated; InvalidRequest for one
    without any token, of which a model would make up its answer, or with tokens beyond the ``known``.
    """
    cut = {"truncation": True, "max_length": context} if truncate and context is not None else {"truncation": False}
    rows = tokens_of(texts, **cut)
    for i, row in enumerate(rows):
        which = f" (number {i + 1} of {len(rows)} in its call)" if len(rows) > 1 else ""
        if not row:
            raise InvalidRequest(f"a text{which} has no tokens: it is empty, and the model's tokenizer adds none")
        check_known(row, known)
        if context is not None and len(row) > context:
            raise TooLong(
                f"a text of {len(row)} tokens{which} does not fit the model's {context}; "
                "shorten it, or let it be cut by options.truncate = true"
            )
    return [Piece(tokens=len(row), payload=row) for row in rows]


def plain_tokens(tokenizer: Any) -> TokensOf:
    """A text as it is, with the model's special tokens and without padding."""

    def tokens_of(texts: Sequence[str], **cut: Any) -> list[list[int]]:
        rows: list[list[int]] = tokenizer(list(texts), padding=False, verbose=False, **cut)["input_ids"]
        return rows

    return tokens_of


def padded(tokenizer: Any, rows: Sequence[list[int]], device: Any) -> dict[str, Any]:
    """Token ids and attention mask of rows as tensors, padded on the side that `settle_padding` left."""
    features = tokenizer.pad({"input_ids": list(rows)}, padding=True, return_tensors="pt")
    return {name: tensor.to(device) for name, tensor in features.items()}
