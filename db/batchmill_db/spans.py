"""Conditions on a set of row numbers that an index serves, however scattered the rows are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement

from batchmill_core.job import Rows

MOST_RANGES = 8
MOST_NUMBERS = 500


def among(column: ColumnElement[Any], rows: Rows) -> Iterator[ColumnElement[bool]]:
    """Conditions that together hold for exactly these rows, each for a statement of its own.

    A few ranges are one condition each; scattered rows are lists of numbers, short enough for any limit of parameters.
    """
    if len(rows.ranges) <= MOST_RANGES:
        for first, last in rows.ranges:
            yield column.between(first, last)
        return
    numbers = iter(rows)
    while piece := list(islice(numbers, MOST_NUMBERS)):
        yield column.in_(piece)
