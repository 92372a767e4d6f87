"""Laws of the retry decision, over the whole error tree."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core import errors
from batchmill_core.errors import CallError, Scope
from batchmill_core.request import RowStatus
from batchmill_workers.retry import CAP_S, Decision, GiveUp, Retry, Snooze, StopAccount, StopJob, decide


def tree(root: type[CallError]) -> list[type[CallError]]:
    return [root, *(kind for sub in root.__subclasses__() for kind in tree(sub))]


KINDS = st.sampled_from(tree(CallError))
COUNTS = st.integers(0, 10_000)
HINTS = st.none() | st.floats(0, 86_400)
SEEDS = st.integers(0, 2**32)


def after(error: CallError, *, tries: int = 1, max_retries: int = 5, waits: int = 0, seed: int = 0) -> Decision:
    return decide(error, tries=tries, max_retries=max_retries, waits=waits, rng=random.Random(seed))


@given(KINDS, COUNTS, COUNTS, HINTS, SEEDS)
def test_faults_of_the_account_or_job_stop_it_whatever_was_tried(
    kind: type[CallError], tries: int, waits: int, hint: float | None, seed: int
) -> None:
    decision = after(kind("x", wait_s=hint), tries=tries, waits=waits, seed=seed)

    assert isinstance(decision, StopAccount) == (kind.scope is Scope.ACCOUNT)
    assert isinstance(decision, StopJob) == (kind.scope is Scope.JOB)


@given(KINDS, COUNTS, COUNTS, HINTS, SEEDS)
def test_a_hint_is_a_floor_and_at_most_doubled(
    kind: type[CallError], tries: int, waits: int, hint: float | None, seed: int
) -> None:
    decision = after(kind("x", wait_s=hint), tries=tries, waits=waits, max_retries=20_000, seed=seed)

    if isinstance(decision, Retry | Snooze):
        floor = hint or 0.0
        assert floor <= decision.delay_s <= floor + (CAP_S if hint is None else max(0.5, floor))


@given(KINDS, COUNTS, COUNTS, HINTS, SEEDS)
def test_short_waits_stay_in_the_loop_and_longer_ones_are_handed_back(
    kind: type[CallError], tries: int, waits: int, hint: float | None, seed: int
) -> None:
    decision = after(kind("x", wait_s=hint), tries=tries, waits=waits, seed=seed)

    if isinstance(decision, Retry):
        assert decision.delay_s <= 5.0
    if isinstance(decision, Snooze):
        assert decision.delay_s > 5.0


@given(KINDS, st.integers(0, 50), st.integers(0, 50), COUNTS, SEEDS)
def test_a_row_is_given_up_exactly_when_no_try_can_help(
    kind: type[CallError], tries: int, max_retries: int, waits: int, seed: int
) -> None:
    decision = after(kind("x"), tries=tries, max_retries=max_retries, waits=waits, seed=seed)

    hopeless = not kind.retryable or (not kind.waits and tries > max_retries)
    assert isinstance(decision, GiveUp) == (kind.scope is Scope.ROW and hopeless)
    if isinstance(decision, GiveUp):
        assert decision.status is kind.final_status


@given(KINDS, COUNTS, COUNTS, HINTS, SEEDS)
def test_the_same_seed_decides_the_same(
    kind: type[CallError], tries: int, waits: int, hint: float | None, seed: int
) -> None:
    error = kind("x", wait_s=hint)

    assert after(error, tries=tries, waits=waits, seed=seed) == after(error, tries=tries, waits=waits, seed=seed)


def test_max_retries_of_two_allows_three_calls() -> None:
    error = errors.CallTimeout("late")

    decisions = [after(error, tries=n, max_retries=2) for n in (1, 2, 3)]

    assert [type(d) for d in decisions] == [Retry, Retry, GiveUp]


def test_an_answer_that_never_fits_the_schema_ends_invalid() -> None:
    decision = after(errors.InvalidOutput("no label"), tries=6, max_retries=5)

    assert decision == GiveUp(status=RowStatus.INVALID)


def test_waiting_errors_outlast_every_number_of_tries() -> None:
    decision = after(errors.RateLimited("slow down"), tries=1000, max_retries=0, waits=1000)

    assert isinstance(decision, Retry | Snooze)


def test_backoff_grows_with_failures_until_its_cap() -> None:
    rng = random.Random(7)
    error = errors.Unreachable("refused")

    def mean(waits: int) -> float:
        delays = [decide(error, tries=0, max_retries=5, waits=waits, rng=rng) for _ in range(500)]
        return sum(d.delay_s for d in delays if isinstance(d, Retry | Snooze)) / 500

    assert [mean(n) for n in (1, 2, 4, 8, 100)] == pytest.approx([0.25, 0.5, 2.0, 30.0, 30.0], rel=0.15)


def test_rows_told_the_same_wait_do_not_come_back_at_once() -> None:
    rng = random.Random(1)
    error = errors.RateLimited("slow down", wait_s=2.0)

    decisions = {decide(error, tries=0, max_retries=5, waits=1, rng=rng) for _ in range(100)}

    assert len(decisions) == 100
