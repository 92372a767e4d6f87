"""What to do after a call that gave no answer: one pure decision over the error tree."""

from __future__ import annotations

import random
from dataclasses import dataclass

from batchmill_core.errors import CallError, Scope
from batchmill_core.request import RowStatus

BASE_S = 0.5
CAP_S = 60.0
IN_LOOP_LIMIT_S = 5.0
_LONGEST_EXPONENT = 16  # 0.5 s doubled 16 times is far beyond the cap; keeps 2**n small


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Call again after ``delay_s``, waiting in the loop."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snooze:
    """Hand the row back as a derived chunk that may run after ``delay_s``; waiting is not failing."""

    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The row ends here (or goes on to the next step of its route) with ``status``."""

    status: RowStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAccount:
    """The fault is the account's: stop it everywhere with one message; the row keeps its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopJob:
    """The fault is the job's: pause it with one message; the row keeps its turn."""


Decision = Retry | Snooze | GiveUp | StopAccount | StopJob


def decide(
    error: CallError,
    *,
    tries: int,
    max_retries: int,
    waits: int,
    rng: random.Random,
    in_loop_limit_s: float = IN_LOOP_LIMIT_S,
) -> Decision:
    """What follows ``error``.

    ``tries`` counts the row's calls of this round that used up a try, this one included; ``max_retries`` more calls
    may follow the first. ``waits`` counts how many times in sequence the row was told to wait, this one included.
    Errors that wait never exhaust the tries: a provider that asks for patience gets it.
    """
    if error.scope is Scope.ACCOUNT:
        return StopAccount()
    if error.scope is Scope.JOB:
        return StopJob()
    if not error.retryable or (not error.waits and tries > max_retries):
        return GiveUp(status=error.final_status)
    delay = delay_s(error.wait_s, failures=max(tries, waits), rng=rng)
    return Retry(delay_s=delay) if delay <= in_loop_limit_s else Snooze(delay_s=delay)


def delay_s(wait_s: float | None, *, failures: int, rng: random.Random) -> float:
    """Seconds to wait after the ``failures``-th failure in a row.

    Without a hint of the provider: full jitter, uniform over [0, min(60, 0.5 * 2**(failures - 1))]. A hint is a floor;
    what is added spreads the rows that were told the same, by no more than the hint itself (or 0.5 s).
    Source: M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015.
    """
    exponent = min(max(failures - 1, 0), _LONGEST_EXPONENT)
    ceiling = min(CAP_S, BASE_S * 2.0**exponent)
    if wait_s is None:
        return rng.uniform(0.0, ceiling)
    floor = max(wait_s, 0.0)
    return floor + rng.uniform(0.0, min(ceiling, max(floor, BASE_S)))
