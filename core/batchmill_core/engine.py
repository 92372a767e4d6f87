"""The Engine protocol and its lookup by entry point."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Protocol, runtime_checkable

from .errors import ConfigurationError
from .request import Completion, Request

ENTRY_POINT_GROUP = "batchmill.engines"


@runtime_checkable
class Engine(Protocol):
    """Turns one Request into one Completion, many at a time on one event loop.

    ``capacity_rows`` is how many requests it likes to have in flight at once. ``context_tokens`` is the model's
    context window in tokens (None: not known here, the provider says so by an error).
    """

    capacity_rows: int
    context_tokens: int | None

    async def start(self) -> None:
        """Loads and warms what it needs; called once, before the first claim. Raises ConfigurationError if it can't."""

    async def complete(self, request: Request) -> Completion:
        """Answers one request. Safe to call concurrently; cancelling the awaiting task abandons the call.

        Raises a CallError, and only that, when there is no usable answer; a prompt that does not fit raises TooLong
        before anything runs.
        """

    async def close(self) -> None:
        """Frees connections, threads and device memory. Idempotent."""


def engine_class(name: str) -> type[Engine]:
    """The class that an installed package registered under ``batchmill.engines``.

    It is constructed with keyword arguments ``model`` (a catalog.ModelEntry) and ``device`` (a string such as ``cpu``
    or ``cuda:0``). Raises ConfigurationError naming the engines there are.
    """
    found = {e.name: e for e in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise ConfigurationError(
            f"no engine is called {name!r}; installed engines: {', '.join(sorted(found)) or 'none'}"
        )
    loaded: type[Engine] = found[name].load()
    return loaded
