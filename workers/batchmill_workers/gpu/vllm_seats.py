"""Which requests are in vLLM's batch: it takes them in the order in which they came, as many as it has seats for."""

from __future__ import annotations


class Seats:
    """Requests by number, seated or in line.

    vLLM tells how many requests run, not which. Its scheduler is first come, first served, so the oldest ones run;
    where the key-value cache is full before the seats are, some that count as seated here still wait there.
    """

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._line: dict[int, None] = {}
        self._seated: set[int] = set()

    def come(self, number: int) -> list[int]:
        """A request came: those that are seated by that, itself or none."""
        self._line[number] = None
        return self._fill()

    def leave(self, number: int) -> list[int]:
        """A request is finished or was abandoned: those that are seated in its place."""
        self._line.pop(number, None)
        self._seated.discard(number)
        return self._fill()

    def _fill(self) -> list[int]:
        seated = []
        while self._line and len(self._seated) < self._seats:
            number = next(iter(self._line))
            del self._line[number]
            self._seated.add(number)
            seated.append(number)
        return seated
