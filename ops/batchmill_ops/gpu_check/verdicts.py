"""What came of each item, told as soon as it is known."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``detail`` is the figures of a pass, why it failed, or why it was skipped."""

    outcome: Outcome
    detail: str


def passed(detail: str) -> Verdict:
    return Verdict(outcome=Outcome.PASS, detail=detail)


def failed(detail: str) -> Verdict:
    return Verdict(outcome=Outcome.FAIL, detail=detail)


def skipped(why: str) -> Verdict:
    return Verdict(outcome=Outcome.SKIP, detail=why)


def judged(good: bool, detail: str) -> Verdict:
    return passed(detail) if good else failed(detail)


@dataclass(slots=True)
class Sheet:
    """The items in their order."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def item(self, name: str, check: Callable[[], Verdict]) -> Verdict:
        """Runs one item. An error of it is its failure: the others go on."""
        try:
            verdict = check()
        except Exception as fault:  # noqa: BLE001  # edge of an item: whatever it was stands on the sheet
            verdict = failed(f"{type(fault).__name__}: {fault}")
        return self.note(name, verdict)

    def note(self, name: str, verdict: Verdict) -> Verdict:
        self.verdicts[name] = verdict
        seconds = time.monotonic() - self._began
        sys.stdout.write(f"{verdict.outcome:4}  {name:10}  {verdict.detail}  (after {seconds:.0f} s)\n")
        sys.stdout.flush()
        return verdict

    def has(self, outcome: Outcome) -> bool:
        return any(v.outcome is outcome for v in self.verdicts.values())
