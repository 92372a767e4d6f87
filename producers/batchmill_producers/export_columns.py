"""Names of the columns of an export: those of results, and those of the input beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from batchmill_core.errors import ConfigurationError

from .export_rows import COLUMNS, Result

INPUT = "input"


def without_clashes(given: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Names for columns of the input: one that is called like a column of ours becomes ``input.NAME``."""
    used, names = set(taken), []
    for name in given:
        while name in used:
            name = f"{INPUT}.{name}"  # noqa: PLW2901  # until it is free
        used.add(name)
        names.append(name)
    return names


def no_column(r: Result, name: str, given: Mapping[str, Any]) -> ConfigurationError:
    """An error for a column that neither results nor this row's input have."""
    return ConfigurationError(f"row {r.row} has no column {name!r}; {there_are(name, [*COLUMNS, *given])}")


def there_are(name: str, known: Sequence[str]) -> str:
    """The columns that can be asked for instead of ``name``, the nearest before all."""
    close = get_close_matches(name, known, n=1)
    return f"{f'did you mean {close[0]!r}? There' if close else 'there'} are {', '.join(known)}"
