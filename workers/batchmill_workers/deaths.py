"""How often an engine's process died without an answer in between: a row's fault, or the device's."""

from __future__ import annotations

# Halving finds a row that kills its engine within four deaths, since the half without it answers; two such rows in two
# chunks take six. So many without one answer say that it is not the rows.
LIMIT = 8


class Deaths:
    """Counts deaths, not calls: all calls that were in flight when the process died belong to one death.

    Belongs to one event loop: it takes no lock.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.life = 0  # which life of the process this is; a call remembers the one that it began in
        self.in_a_row = 0
        self._limit = limit

    def answered(self) -> None:
        self.in_a_row = 0

    def died(self, life: int) -> bool:
        """A call of that life was lost. True when the process died too often to be tried once more."""
        if life == self.life:
            self.life += 1
            self.in_a_row += 1
        return self.in_a_row >= self._limit
