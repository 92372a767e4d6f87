"""The Engine protocol and its lookup by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What an engine does just now, and what it did since it was made; None where it does not know.

    ``running`` are requests that the device works on, ``waiting`` those that the engine holds until there is room.
    ``batch_rows`` is the mean size of the batches run lately, ``kv_cache_percent`` how full the key-value cache is.
    ``output_tokens`` and ``busy_ns`` (time in which at least one request ran, in nanoseconds) only ever grow.
    """

    running: int = 0
    waiting: int = 0
    batch_rows: float | None = None
    kv_cache_percent: float | None = None
    output_tokens: int = 0
    busy_ns: int = 0


@runtime_checkable
class Observable(Protocol):
    """An engine that can say what it does."""

    def figures(self) -> EngineFigures:
        """Cheap, and safe to call from any thread."""


@runtime_checkable
class Tunable(Protocol):
    """An engine that finds out by trying how many rows of a length fit its device at once.

    Sizes are rows by length class: class ``c`` holds requests of at most ``2**c`` tokens, prompt and answer together.
    """

    def use_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        """Sizes that worked before, for this model on this device; called before ``start``."""

    def batch_sizes(self) -> Mapping[int, int]:
        """Sizes that work, as far as it is known by now. Safe to call from any thread."""


@runtime_checkable
class TimesCalls(Protocol):
    """An engine that ends calls itself: one of which nothing is heard for ``call_timeout_s`` seconds; others are cut off.

    What counts is up to the engine: a server of the user's own is asked for the one call, an engine with a process of
    its own is watched as a whole, since a call on a busy device takes as long as those beside it let it.
    """

    call_timeout_s: float


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
