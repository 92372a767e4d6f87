"""Lets a chunk that is suspected of crashing run alone, so that no other is blamed for its crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Isolation:
    """Any number of attempts at once, or one that is alone. Who wants to be alone lets nobody in after it asked."""

    def __init__(self) -> None:
        self._inside = 0
        self._alone = 0  # those that are or want to be alone
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def entered(self, *, alone: bool) -> AsyncIterator[None]:
        """Waits for its turn, and holds it for the length of a ``with`` block."""
        await self._enter(alone)
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._alone -= alone
                self._changed.notify_all()

    async def _enter(self, alone: bool) -> None:
        async with self._changed:
            self._alone += alone
            try:
                await self._changed.wait_for(lambda: self._inside == 0 if alone else self._alone == 0)
            except asyncio.CancelledError:
                self._alone -= alone
                self._changed.notify_all()
                raise
            self._inside += 1
