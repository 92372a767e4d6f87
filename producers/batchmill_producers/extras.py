"""Says which extra to install where an optional library is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchmill_core.errors import ConfigurationError


@contextmanager
def needed_for(what: str, *, install: str) -> Iterator[None]:
    """Imports inside the ``with`` block; raises ConfigurationError naming what to install when one is missing."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{what} needs a library that is missing: pip install '{install}' ({error})"
        ) from error
