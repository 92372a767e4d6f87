"""What the process asks of a loaded model, whatever it does: read a request, run a batch step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.frames import Frame

BROKEN = "broken"  # a kind of failure beside those of ``hosted_process.failure``
Answered = Callable[[Item, Frame], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One text of a request, tokenised. ``wanted`` is how many tokens may be answered, and only texts of one ``group`` run
    together, see ``batching.Item``.
    """

    tokens: int
    wanted: int = 0
    group: Hashable = None
    prefix: str = ""
    payload: Any = None


def broken(message: str) -> Frame:
    """What a row is answered that cannot be, however often it is tried: the others of its batch go on."""
    return {"error": {"kind": BROKEN, "message": message}}


def refused(message: str) -> Frame:
    """What a row is answered whose request nobody can answer."""
    return {"error": {"kind": "invalid_request", "message": message}}


class Run(Protocol):
    """A batch on the device."""

    @property
    def live(self) -> Sequence[Item]:
        """The rows that are not answered yet."""

    def step(self, answered: Answered) -> None:
        """Computes one step, telling which rows it finished, some perhaps as ``broken``. Whatever the device raises
        comes out of it.
        """

    def drop(self, numbers: frozenset[int]) -> None:
        """Leaves out rows that nobody waits for any more."""


class Work(Protocol):
    """A loaded model. ``read`` and ``begin`` are called from two threads, each from one only."""

    task: str
    context_tokens: int | None

    def read(self, frame: Frame) -> list[Piece]:
        """The texts of a request, in order. Raises InvalidRequest or TooLong for one that cannot be run."""

    def begin(self, items: Sequence[Item]) -> Run:
        """A batch that is run by its steps; nothing is computed yet."""

    def merge(self, parts: Sequence[Frame]) -> Frame:
        """The last message of a call out of what its texts were answered, in their order."""
