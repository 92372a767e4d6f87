"""Regular expressions of a schema, searched within a time limit.

Schemas come from submitters and texts from models: ``^(a+)+$`` takes Python's ``re`` minutes on forty characters, in which
a worker renews no lease. The library ``regex`` reads the same expressions, and ``\\p{L}`` of ECMA-262 too, and gives up when
told to.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import regex

from .errors import ConfigurationError


class TooSlow(ValueError):
    """A search took longer than it may."""


@lru_cache(maxsize=512)
def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Raises ConfigurationError for what is no regular expression."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what later versions of the library may read otherwise
            return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ConfigurationError(
            f"the schema's pattern {pattern[:100]!r} is not a regular expression: {error}"
        ) from error


def found(pattern: str, text: str, *, timeout_s: float) -> bool:
    """Whether the pattern is anywhere in the text. Raises TooSlow, or ConfigurationError as `compile_pattern` does."""
    if timeout_s > 0:
        try:
            return compile_pattern(pattern).search(text, timeout=timeout_s) is not None
        except TimeoutError:
            pass
    raise TooSlow(
        f"the schema's pattern {pattern[:100]!r} takes too long; write it without a repetition in a repetition"
    )


def with_our_patterns(formats: Any) -> Any:
    """A ``jsonschema.FormatChecker`` that takes for a ``regex`` what we can search for, and else is as the given one."""
    ours = type(formats)(formats=())
    ours.checkers = {**formats.checkers, "regex": (_is_pattern, ConfigurationError)}
    return ours


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or compile_pattern(value) is not None
