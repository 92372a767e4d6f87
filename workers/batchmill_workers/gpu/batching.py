"""Which waiting rows run together on a device: rows of one group and of similar length, in a batch that fits."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

_MOST_REFUSED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One row that waits for the device.

    ``tokens`` is the length of its prompt, ``wanted`` how many tokens may be answered (0: embedding, classification).
    Only rows of the same ``group`` may run in one batch: same task, same sampling. Rows with the same ``prefix`` begin
    alike. ``arrived_ns`` is the batcher's monotonic clock; ``payload`` is the engine's own.
    """

    number: int
    tokens: int
    wanted: int = 0
    arrived_ns: int
    group: Hashable = None
    prefix: str = ""
    payload: Any = None

    @property
    def length(self) -> int:
        return max(1, self.tokens + self.wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows to be run together, those that share a prefix next to each other. ``last_try``: alone, and failed before."""

    items: tuple[Item, ...]
    last_try: bool = False

    @property
    def rows(self) -> int:
        return len(self.items)

    @property
    def padded(self) -> int:
        """Tokens that each row takes up: the longest prompt and the longest answer, which need not be one row's."""
        return max(1, max(i.tokens for i in self.items) + max(i.wanted for i in self.items))

    @property
    def row_tokens(self) -> int:
        """What it takes up on the device: rows x padded length."""
        return self.rows * self.padded

    @property
    def length_class(self) -> int:
        return length_class(self.padded)

    @property
    def halves(self) -> tuple[Batch, Batch]:
        """Two batches of its rows, of which there are two at least."""
        half = self.rows // 2
        return Batch(items=self.items[:half]), Batch(items=self.items[half:])

    def without(self, numbers: Iterable[int]) -> Batch | None:
        """The batch without these rows; None when none is left."""
        gone = set(numbers)
        left = tuple(item for item in self.items if item.number not in gone)
        return replace(self, items=left) if left else None


class Budgets(Protocol):
    """How much fits at once: `batching_sizes.Sizes`."""

    def budget(self, length_class: int) -> int:
        """Row-tokens (rows x padded length) that a batch of this length class may take up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a batch goes and what it may hold.

    ``max_rows`` and ``max_tokens`` (rows x padded length) bound every batch, whatever has been learned; one row alone
    may be longer. ``in_flight`` is how many requests the worker has here at most; 4 x ``max_rows`` and more let rows of
    like length come together. ``max_padding`` is the share of a batch that may be padding before rows of another length
    class are left for the next: 0.4 suits embeddings, where padding is computed; 0.6 suits generation, where a step
    costs about the same for few rows (simulated: tests/benchmarks/bench_batching.py).
    """

    max_rows: int
    max_tokens: int | None = None
    max_wait_ms: float = 50.0
    settle_ms: float = 5.0
    in_flight: int | None = None
    max_padding: float = 0.4


def length_class(length: int) -> int:
    """The class ``c`` of lengths of at most ``2**c`` and more than ``2**(c-1)`` tokens."""
    return max(0, (max(1, length) - 1).bit_length())


def room(length: int, limits: Limits, budgets: Budgets) -> int:
    """How many rows of this padded length fit in one batch; 1 at least."""
    tokens = budgets.budget(length_class(length))
    if limits.max_tokens is not None:
        tokens = min(tokens, limits.max_tokens)
    return max(1, min(limits.max_rows, tokens // length))


def pick(kinds: Mapping[int, Collection[Item]], first: Item, limits: Limits, budgets: Budgets) -> Batch:
    """The batch around ``first`` out of the waiting rows of its group, which are given by length class, oldest first.

    Rows of its own class come first, of those the ones that share its prefix; room that is left goes to the rows
    nearest in length, shorter ones before longer ones, up to the first that would make too much padding.
    """
    draft = _Draft(first, limits, budgets)
    own = length_class(first.length)
    alike = kinds.get(own, ())
    draft.take_all(item for item in alike if item.prefix == first.prefix)
    draft.take_all(item for item in alike if item.prefix != first.prefix)
    for c in sorted((c for c in kinds if c < own), reverse=True):
        if not draft.take_while(sorted(kinds[c], key=_length, reverse=True)):
            break
    for c in sorted(c for c in kinds if c > own):
        if not draft.take_while(sorted(kinds[c], key=_length)):
            break
    return Batch(items=tuple(sorted(draft.items, key=lambda i: (i.prefix, i.length, i.number))))


def _length(item: Item) -> int:
    return item.length


class _Draft:
    """A batch that grows by one row after the other as long as it keeps within the limits."""

    def __init__(self, first: Item, limits: Limits, budgets: Budgets) -> None:
        self.items = [first]
        self._limits = limits
        self._budgets = budgets
        self._class = length_class(first.length)
        self._tokens, self._wanted, self._sum = first.tokens, first.wanted, first.length

    def take_all(self, items: Iterable[Item]) -> None:
        """Takes those of the rows that fit; gives up after some that do not, since most of a class are alike."""
        refused = 0
        for item in items:
            if refused > _MOST_REFUSED or len(self.items) >= self._limits.max_rows:
                return
            if item is not self.items[0]:
                refused += not self._add(item)

    def take_while(self, items: Iterable[Item]) -> bool:
        """Takes rows up to the first that does not fit; whether more may."""
        return all(len(self.items) < self._limits.max_rows and self._add(item) for item in items)

    def _add(self, item: Item) -> bool:
        """Takes the row if the batch with it fits, and is not padding beyond measure."""
        tokens, wanted = max(self._tokens, item.tokens), max(self._wanted, item.wanted)
        padded, rows, length = max(1, tokens + wanted), len(self.items) + 1, item.length
        if rows > room(padded, self._limits, self._budgets):
            return False
        foreign = length_class(length) != self._class or length_class(padded) != self._class
        if foreign and 1 - (self._sum + length) / (rows * padded) > self._limits.max_padding:
            return False
        self.items.append(item)
        self._tokens, self._wanted, self._sum = tokens, wanted, self._sum + length
        return True
