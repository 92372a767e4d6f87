"""Sampling parameters under OpenAI's names become one checked value."""

from __future__ import annotations

import pytest

from batchmill_core.errors import InvalidRequest
from batchmill_workers.gpu.sampling import Sampling, cut_at_stop


def test_what_is_not_given_is_left_to_the_model() -> None:
    assert Sampling.from_params({"temperature": None}) == Sampling()


def test_openai_names_are_understood() -> None:
    sampling = Sampling.from_params({"max_completion_tokens": 7, "temperature": 0, "stop": "END", "n": 1})

    assert sampling == Sampling(max_tokens=7, temperature=0.0, stop=("END",))


def test_an_unknown_parameter_names_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'top_p'"):
        Sampling.from_params({"top_pp": 0.5})


@pytest.mark.parametrize("value", [True, "0.5", float("nan"), float("inf"), -0.1, [1]])
def test_a_temperature_that_is_no_number_in_range_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="temperature"):
        Sampling.from_params({"temperature": value})


def test_the_ends_of_top_p_and_min_p_leave_the_likeliest_token_by_numbers_that_every_engine_takes() -> None:
    sampling = Sampling.from_params({"top_p": 0, "min_p": 1})

    assert (sampling.top_p, sampling.min_p) == (1e-6, 0.999)


@pytest.mark.parametrize("params", [{"top_p": -0.1}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}], ids=str)
def test_a_share_outside_0_to_1_is_refused(params: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="at least 0"):
        Sampling.from_params(params)


@pytest.mark.parametrize("value", [0, -5, 1.5, True, "9", 2**40])
def test_max_tokens_is_a_whole_number_from_one(value: object) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        Sampling.from_params({"max_tokens": value})


def test_text_is_cut_at_the_first_stop_text() -> None:
    assert cut_at_stop("one two three", ("three", "two")) == "one "
    assert cut_at_stop("one", ("x",)) == "one"
    assert cut_at_stop("one", ()) == "one"
