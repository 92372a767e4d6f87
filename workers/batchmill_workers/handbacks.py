"""Rows that an attempt hands back, as the child chunks in which they go on."""

from __future__ import annotations

from collections.abc import Sequence

from batchmill_core.job import Rows, Spec
from batchmill_db.chunks import Child

from .answer import Handback

_MS = 1000


def children_of(handbacks: Sequence[Handback], spec: Spec, *, step: int) -> list[Child]:
    """One child per step and time: waits are rounded up to whole seconds so that rows come back together."""
    groups: dict[tuple[int, int], list[Handback]] = {}
    for one in handbacks:
        groups.setdefault((step + one.next_step, _MS * -int(-one.wait_s // 1)), []).append(one)
    return [
        Child(
            rows=Rows.of(row for one in alike for row in one.rows),
            queue=spec.steps[at].queue,
            step=at,
            wait_ms=wait_ms,
            error=next((one.error for one in alike if one.error), None),
        )
        for (at, wait_ms), alike in sorted(groups.items())
    ]
