"""An engine that dies again and again without an answer is not started for ever."""

from __future__ import annotations

from batchmill_workers.deaths import Deaths


def test_all_calls_of_one_death_count_once() -> None:
    deaths = Deaths(limit=2)
    life = deaths.life

    assert [deaths.died(life) for _ in range(5)] == [False] * 5
    assert deaths.in_a_row == 1


def test_deaths_in_a_row_reach_the_limit() -> None:
    deaths = Deaths(limit=3)

    assert [deaths.died(deaths.life) for _ in range(3)] == [False, False, True]


def test_an_answer_in_between_starts_the_count_again() -> None:
    deaths = Deaths(limit=2)
    deaths.died(deaths.life)
    deaths.answered()

    assert not deaths.died(deaths.life)


def test_calls_that_were_lost_with_the_last_death_are_told_too() -> None:
    deaths = Deaths(limit=1)
    life = deaths.life
    deaths.died(life)

    assert deaths.died(life)
