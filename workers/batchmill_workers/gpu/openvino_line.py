"""Rows that wait for a place in OpenVINO's batch, and which of them may go now.

OpenVINO looks a prompt up in its cache of prefixes once, when the request is added: of rows that are added together each
computes the prefix for itself. So a row goes when a place is free and nobody is computing more of its beginning. And it
compiles a schema inside a step: one that it refuses spoils that step for all, unless its row is alone in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 32  # the processor's key-value cache shares whole blocks of so many tokens
_REMEMBERED = 1 << 16  # blocks of prompts, which are two million tokens; and schemas


@dataclass(slots=True, kw_only=True)
class _Place:
    """A row's blocks of prompt, until they are computed, and its schema."""

    blocks: Sequence[Hashable]
    schema: Hashable


class Line:
    """The numbers of waiting rows in the order of their arrival; ``places`` may be in the batch at once."""

    def __init__(self, *, places: int, prefixes: bool) -> None:
        """``prefixes`` False: the engine caches none, and no row waits for another's."""
        self._places = places
        self._prefixes = prefixes
        self._waiting: dict[int, _Place] = {}
        self._in_batch: dict[int, _Place] = {}
        self._on_trial: int | None = None
        self._computing: dict[Hashable, int] = {}  # by how many rows
        self._computed: OrderedDict[Hashable, None] = OrderedDict()
        self._tried: OrderedDict[Hashable, None] = OrderedDict()

    def put(self, number: int, tokens: Sequence[int], *, schema: Hashable = None) -> None:
        self._waiting[number] = _Place(blocks=blocks(tokens) if self._prefixes else (), schema=schema)

    def remove(self, number: int) -> None:
        """Forgets a row that waits, if it does."""
        self._waiting.pop(number, None)

    def take(self) -> Iterator[int]:
        """The rows that may go now; each has a place from then on, until it ``leaves``."""
        for number, row in list(self._waiting.items()):
            if len(self._in_batch) >= self._places or self._on_trial is not None:
                return
            untried = row.schema is not None and row.schema not in self._tried
            if untried and self._in_batch:
                return
            if self._is_computed_by_another(row):
                continue
            self._on_trial = number if untried else None
            self._enter(number)
            yield number

    def prompt_is_computed(self, number: int) -> None:
        """Rows with the same beginning may go, since it is in the cache, and rows with the same schema."""
        row = self._in_batch[number]
        _remember(self._computed, row.blocks)
        if number == self._on_trial:
            _remember(self._tried, [row.schema])
            self._on_trial = None
        self._end_computing(row)

    def leaves(self, number: int) -> None:
        """The row is out of the batch, whatever it has computed."""
        self._end_computing(self._in_batch.pop(number))
        if number == self._on_trial:
            self._on_trial = None

    @property
    def on_trial(self) -> int | None:
        """The row that is alone in the batch because nobody has tried its schema."""
        return self._on_trial

    @property
    def in_batch(self) -> int:
        """How many rows have a place."""
        return len(self._in_batch)

    def _enter(self, number: int) -> None:
        row = self._in_batch[number] = self._waiting.pop(number)
        for block in row.blocks:
            self._computing[block] = self._computing.get(block, 0) + 1

    def _is_computed_by_another(self, row: _Place) -> bool:
        """Blocks are chained: who computes a later one computes the first that is missing, too."""
        missing = next((block for block in row.blocks if block not in self._computed), None)
        return missing in self._computing

    def _end_computing(self, row: _Place) -> None:
        for block in row.blocks:
            self._computing[block] -= 1
            if not self._computing[block]:
                del self._computing[block]
        row.blocks = ()


def blocks(tokens: Sequence[int]) -> list[Hashable]:
    """One key per whole block of the prompt, which stands for all tokens up to its end."""
    keys: list[Hashable] = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        before = keys[-1] if keys else None
        keys.append(hash((before, tuple(tokens[end - BLOCK_TOKENS : end]))))
    return keys


def _remember(known: OrderedDict[Hashable, None], keys: Sequence[Hashable]) -> None:
    for key in keys:
        known[key] = None
        known.move_to_end(key)
    while len(known) > _REMEMBERED:
        known.popitem(last=False)
