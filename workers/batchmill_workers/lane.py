"""A lane: one engine with its window, as an attempt of a chunk sees it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from batchmill_core.job import Step
from batchmill_core.request import Completion, Request

from .unit import Unit
from .window import Window

EMBED_ROWS = 64
LONG_PAUSE_S = 5.0
LINE_S = 2.5  # rows are not booked while those before them wait longer than this for the account's rates


class Lane(Protocol):
    """One engine with its window. ``embed_rows`` is how many rows one embedding call covers."""

    window: Window
    embed_rows: int
    book_rows: int  # how many rows are booked in the ledger together, before they stand in line
    book_tokens: float  # and at most so many tokens, unless it is one row

    @property
    def side_by_side(self) -> int:
        """How many rows share what a device costs; 1 where each call is paid for by itself."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def line_s(self, step: Step) -> float:
        """How long a row booked now would wait for rates, in seconds."""

    def tokens_of(self, request: Request) -> int:
        """The tokens that a request is let in with; 0 where they are not limited."""

    def coming(self, step: Step, tokens: Sequence[int]) -> AbstractContextManager[None]:
        """Counts requests as in line that are being booked, and line up when the block is left."""

    def pause_s(self) -> float:
        """For how long the provider asked everybody to wait, in seconds."""

    async def send(self, request: Request, step: Step, unit: Unit) -> Completion: ...

    def describe(self) -> str | None:
        """Why it waits just now, for people; None when it does not."""
