"""Whether a server that runs still serves: decided from what became of its calls, without I/O or clock."""

from __future__ import annotations

UNREACHABLE_FOR_S = 20.0
FAULTS = 8  # answers in a row


class Pulse:
    """What the calls of one run of a server say about it. Moments are seconds of one monotonic clock.

    A call that timed out is a slow row's as long as others were answered meanwhile. When nothing at all was, since
    it was sent, the server may hang; when calls came in vain for twice as long, it does.
    """

    def __init__(self) -> None:
        self._answered_at = float("-inf")
        self._asked_in_vain_since: float | None = None
        self._unreachable_since: float | None = None
        self._faults = 0

    def answered(self, now_s: float, *, fault: bool = False) -> None:
        """The server answered something, were it an error; ``fault``: it was one of the server's own."""
        self._faults = self._faults + 1 if fault else 0
        self._answered_at = now_s
        self._asked_in_vain_since = None
        self._unreachable_since = None

    @property
    def only_faults(self) -> bool:
        """Whether it answered nothing but faults of its own lately: its own trouble, or that of the rows it got."""
        return self._faults >= FAULTS

    def is_well(self) -> None:
        """It was seen that the faults are the rows'."""
        self._faults = 0

    @property
    def has_answered(self) -> bool:
        return self._answered_at > float("-inf")

    def sent(self, now_s: float) -> None:
        """A call was sent."""
        if self._asked_in_vain_since is None:
            self._asked_in_vain_since = now_s

    def silent_since(self, moment_s: float) -> bool:
        """Whether it has answered nothing after that moment."""
        return self._answered_at <= moment_s

    def in_vain_s(self, now_s: float) -> float:
        """For how long it has been asked and has answered nothing; 0 where it has answered what was sent last."""
        return 0.0 if self._asked_in_vain_since is None else now_s - self._asked_in_vain_since

    def unreachable(self, now_s: float) -> bool:
        """It took no connection. True when that has gone on for too long for a server that lives."""
        if self._unreachable_since is None:
            self._unreachable_since = now_s
        return now_s - self._unreachable_since >= UNREACHABLE_FOR_S
