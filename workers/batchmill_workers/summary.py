"""What came of an attempt, in words for Flower."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from batchmill_core.request import RowStatus
from batchmill_core.usage import dollars
from batchmill_db.ledger import CallEnd
from batchmill_db.results import NewResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What came of an attempt, in words for Flower."""

    text: str
    queue: str | None = None


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts what an attempt saves."""

    began_s: float = field(default_factory=time.monotonic)
    _rows: Counter[RowStatus] = field(default_factory=Counter)
    _tokens: int = 0
    _cost_nanousd: int | None = None  # None: no call that was counted has a price

    def count(self, rows: Sequence[NewResult], ends: Sequence[CallEnd]) -> None:
        for r in rows:
            self._rows[r.status] += 1
        for e in ends:
            self._tokens += 0 if e.usage is None else e.usage.total
            if e.cost_nanousd is not None:
                self._cost_nanousd = (self._cost_nanousd or 0) + e.cost_nanousd

    def words(self, *, handed_back: int, reason: str) -> str:
        """Such as ``31 ok · 1 handed back (drain) · 4,096 tok · $0.0021 · 18 rows/s``."""
        seconds = max(time.monotonic() - self.began_s, 1e-6)
        parts = [", ".join(f"{n} {s.value}" for s, n in self._rows.most_common()) or "0 rows"]
        if handed_back:
            parts.append(f"{handed_back} handed back ({reason})")
        parts.append(f"{self._tokens:,} tok")
        if self._cost_nanousd is not None:
            parts.append(dollars(self._cost_nanousd))
        parts.append(f"{self._rows.total() / seconds:,.0f} rows/s")
        return " · ".join(parts)
