"""Lengths of time as users write them: ``30s``, ``10m``, ``2h``."""

from __future__ import annotations

import re

from batchmill_core.errors import ConfigurationError

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, None: 1.0}


def parse_seconds(text: str, option: str) -> float:
    """Seconds of a text such as ``90``, ``30s`` or ``1.5h``. Raises ConfigurationError naming the option."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigurationError(f"{option} {text!r} is not a length of time; write for example 30s, 10m or 2h")
    return float(found[1]) * _SECONDS[found[2]]


def patience_of(give_up_after: str | None) -> float | None:
    """Seconds of ``--give-up-after``; None where it is not given. Raises ConfigurationError."""
    return None if give_up_after is None else parse_seconds(give_up_after, "--give-up-after")
