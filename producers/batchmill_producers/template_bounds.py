"""Refuses the operations by which one short expression of a template could fill the memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError

_MAX_BITS = 10_000
_MAX_WIDTH = 100_000
_LONG_WIDTH = re.compile(r"\d{6,}|%[-#0 +]*\*")


def check_product(operator: str, left: Any, right: Any, *, max_chars: int) -> None:
    """Refuses a product, power or formatting whose result would be enormous."""
    if operator == "%" and isinstance(left, str):
        check_width(left)
    if operator == "*" and hasattr(left, "__len__") != hasattr(right, "__len__"):
        sequence, times = (left, right) if hasattr(left, "__len__") else (right, left)
        if isinstance(times, int) and len(sequence) * times > max_chars:
            raise SecurityError("it repeats a value too often")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator != "%" and bits > _MAX_BITS:
            raise SecurityError("it computes a number that is too large")


def check_numbers(values: Iterable[Any]) -> None:
    """Refuses arguments that would be used as an enormous width or count."""
    if any(isinstance(v, int) and v > _MAX_WIDTH for v in values):
        raise SecurityError(f"it asks for a width above {_MAX_WIDTH:,}")


def check_width(pattern: str) -> None:
    """Refuses a format pattern that asks for an enormous width."""
    if _LONG_WIDTH.search(pattern):
        raise SecurityError(f"it asks for a width above {_MAX_WIDTH:,}")


def without_large_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses enormous widths and counts."""

    @wraps(function)  # also carries over whether Jinja2 passes its context first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_numbers((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def without_long_width(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jinja2's ``format`` filter, refusing patterns with an enormous width."""

    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_width(str(value))
        return function(value, *args, **kwargs)

    return bounded
