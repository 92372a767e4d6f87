"""The rows that wait for a device, and when which of them go. Decides by times it is given; holds no lock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from batchmill_workers.gpu.batching import Batch, Budgets, Item, Limits, length_class, pick

_NS_PER_MS = 1_000_000
_SETTLE_SHARE = 0.01  # of the time that the last batch took: the device idles no longer for rows that may yet come


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing goes now. Ask again when something arrives, or at ``until_ns`` (None: only when something arrives)."""

    until_ns: int | None = None


@dataclass(slots=True)
class _Kind:
    """Waiting rows of one group and length class, the oldest first, and the sum of their lengths."""

    items: dict[int, Item] = field(default_factory=dict)
    tokens: int = 0


class WaitingRows:
    """Rows in order of arrival. A batch goes when the device is free and one of these is so:

    - rows of one kind (group and length class) fill it;
    - the oldest row has waited ``max_wait_ms``; it is in the batch that goes then, whatever its length;
    - no more can come: as many rows wait as the worker has in flight at most;
    - no more is coming: the reader holds no unread request and nothing arrived for ``settle_ms``.

    The last two keep a device from waiting for rows that nobody will send. A worker answers a finished batch with new
    rows within milliseconds, so a device that has just become free gives them ``settle_ms`` to arrive, but never more
    than 1 % of the time that the last batch took. Without that a row left over from the batch before would go alone,
    the others after it, and so on for ever.
    """

    def __init__(self, limits: Limits, budgets: Budgets) -> None:
        self.limits = limits
        self._budgets = budgets
        self._items: dict[int, Item] = {}
        self._kinds: dict[Hashable, dict[int, _Kind]] = {}  # by group and length class
        self._again: list[Batch] = []
        self._last_arrival_ns = 0
        self.coming = 0  # requests that the reader has and did not put yet

    def __len__(self) -> int:
        return len(self._items) + sum(batch.rows for batch in self._again)

    @property
    def oldest_ns(self) -> int | None:
        """When the row came that waits the longest; None when none waits."""
        first = self._again[0].items[0] if self._again else next(iter(self._items.values()), None)
        return None if first is None else first.arrived_ns

    def put(self, item: Item) -> None:
        """A row arrives. Raises ValueError for a number that waits already."""
        if item.number in self._items:
            raise ValueError(f"row {item.number} waits already")
        self._items[item.number] = item
        kind = self._kinds.setdefault(item.group, {}).setdefault(length_class(item.length), _Kind())
        kind.items[item.number] = item
        kind.tokens += item.length
        self._last_arrival_ns = max(self._last_arrival_ns, item.arrived_ns)

    def again(self, batches: Sequence[Batch]) -> None:
        """Batches that go before all others, as they are."""
        self._again.extend(batches)

    def remove(self, number: int) -> bool:
        """Whether the row waited; it does no more."""
        if number in self._items:
            self._drop(self._items[number])
            return True
        waited = any(item.number == number for batch in self._again for item in batch.items)
        self._again = [left for batch in self._again if (left := batch.without([number])) is not None]
        return waited

    def next(self, now_ns: int, free_ns: int, last_batch_ns: int | None = None) -> Batch | Wait:
        """The batch that is due, taken out of the waiting rows, or how long to wait.

        ``free_ns`` is when the device became free, ``last_batch_ns`` how long its last batch took.
        """
        if self._again:
            return self._again.pop(0)
        if not self._items:
            return Wait()
        oldest = next(iter(self._items.values()))
        overdue_ns = oldest.arrived_ns + int(self.limits.max_wait_ms * _NS_PER_MS)
        full = self._first_of_a_full_kind()
        if full is None and not self._no_more_can_come():
            due_ns = self._due_ns(overdue_ns, free_ns, self._settle_ns(last_batch_ns))
            if due_ns is None or now_ns < due_ns:
                return Wait(until_ns=due_ns)
        return self._take(full if full is not None and now_ns < overdue_ns else oldest)

    def _due_ns(self, overdue_ns: int, free_ns: int, settle_ns: int) -> int:
        by_age_ns = max(overdue_ns, free_ns + settle_ns)
        if self.coming:
            return by_age_ns
        return min(by_age_ns, max(self._last_arrival_ns, free_ns) + settle_ns)

    def _settle_ns(self, last_batch_ns: int | None) -> int:
        settle_ns = int(min(self.limits.settle_ms, self.limits.max_wait_ms) * _NS_PER_MS)
        return settle_ns if last_batch_ns is None else min(settle_ns, int(last_batch_ns * _SETTLE_SHARE))

    def _no_more_can_come(self) -> bool:
        return self.limits.in_flight is not None and len(self._items) >= self.limits.in_flight

    def _first_of_a_full_kind(self) -> Item | None:
        full = (k for kinds in self._kinds.values() for c, k in kinds.items() if self._fills(c, k))
        return min((next(iter(k.items.values())) for k in full), key=lambda item: item.arrived_ns, default=None)

    def _fills(self, c: int, kind: _Kind) -> bool:
        tokens = self._budgets.budget(c)
        if self.limits.max_tokens is not None:
            tokens = min(tokens, self.limits.max_tokens)
        rows = len(kind.items)
        return rows >= self.limits.max_rows or kind.tokens + kind.tokens // rows > tokens

    def _take(self, first: Item) -> Batch:
        kinds = {c: kind.items.values() for c, kind in self._kinds[first.group].items()}
        batch = pick(kinds, first, self.limits, self._budgets)
        for item in batch.items:
            self._drop(item)
        return batch

    def _drop(self, item: Item) -> None:
        del self._items[item.number]
        kinds, c = self._kinds[item.group], length_class(item.length)
        del kinds[c].items[item.number]
        kinds[c].tokens -= item.length
        if not kinds[c].items:
            del kinds[c]
        if not kinds:
            del self._kinds[item.group]
