"""What came of each item, told as soon as it is known, and written to a file where one is named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any]


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``detail`` is the figures of a pass for people, why it failed, or why it was skipped; ``figures`` are for programs."""

    outcome: Outcome
    detail: str
    figures: Figures = field(default_factory=dict)


def passed(detail: str, **figures: Any) -> Verdict:
    return Verdict(outcome=Outcome.PASS, detail=detail, figures=figures)


def failed(detail: str, **figures: Any) -> Verdict:
    return Verdict(outcome=Outcome.FAIL, detail=detail, figures=figures)


def skipped(why: str, **figures: Any) -> Verdict:
    return Verdict(outcome=Outcome.SKIP, detail=why, figures=figures)


def judged(good: bool, detail: str, **figures: Any) -> Verdict:
    return passed(detail, **figures) if good else failed(detail, **figures)


@dataclass(slots=True, kw_only=True)
class Sheet:
    """The items in their order. ``most_s`` is how long all of them may take; ``path`` is written after each of them."""

    most_s: float
    path: Path | None = None
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def item(self, name: str, check: Callable[[], Verdict], *, needs_s: float = 0.0) -> Verdict:
        """Runs one item, if there is as much time left as it needs. An error of it is its failure: the others go on."""
        left_s = self.most_s - self.seconds
        try:
            late = left_s < needs_s
            verdict = failed(f"not checked: {max(0.0, left_s):.0f} s are left") if late else check()
        except Exception as fault:  # noqa: BLE001  # edge of an item: whatever it was stands on the sheet
            verdict = failed(f"{type(fault).__name__}: {fault}")
        return self.note(name, verdict)

    def note(self, name: str, verdict: Verdict) -> Verdict:
        self.verdicts[name] = verdict
        sys.stdout.write(f"{verdict.outcome:4}  {name:10}  {verdict.detail}  (after {self.seconds:.0f} s)\n")
        sys.stdout.flush()
        self._write()
        return verdict

    def those(self, outcome: Outcome) -> list[str]:
        return [name for name, verdict in self.verdicts.items() if verdict.outcome is outcome]

    def _write(self) -> None:
        if self.path is None:
            return
        items = {
            name: {"outcome": str(one.outcome), "detail": one.detail, **one.figures}
            for name, one in self.verdicts.items()
        }
        found = {"failed": self.those(Outcome.FAIL), "skipped": self.those(Outcome.SKIP), "seconds": self.seconds}
        self.path.write_text(json.dumps({**found, "items": items}, indent=1, default=str) + "\n")
