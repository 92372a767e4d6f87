"""Choosing tokens: each sampling parameter leaves in what it should, and rows do not touch each other."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from batchmill_workers.gpu.transformers_choice import Choice, Chooser, choose  # noqa: E402

LIKELY = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor(LIKELY).log()
DRAWS = 400


def chooser(*, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), seed: int = 1, **settings: Any) -> Chooser:
    return Chooser(choice=Choice(**settings), prompt=prompt, answer=answer, random=random.Random(seed))


def drawn(**settings: Any) -> Counter[int]:
    row = chooser(**settings)
    return Counter(choose(LOGITS[None], [row])[0] for _ in range(DRAWS))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert choose(LOGITS[None], [chooser()]) == [0]


def test_temperature_one_draws_tokens_as_often_as_they_are_likely() -> None:
    found = drawn(temperature=1.0)

    assert [found[i] / DRAWS for i in range(4)] == pytest.approx(LIKELY, abs=0.08)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),
    ],
    ids=str,
)
def test_unlikely_tokens_are_left_out(settings: dict[str, Any], left: set[int]) -> None:
    assert set(drawn(temperature=1.0, **settings)) == left


def test_a_low_temperature_sharpens() -> None:
    assert drawn(temperature=0.3)[0] > drawn(temperature=1.0)[0]


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch() -> None:
    def seeded() -> Chooser:
        return chooser(temperature=1.0, seed=9)

    alone, row = seeded(), seeded()
    others = [chooser(temperature=2.0, seed=s) for s in range(3)] + [chooser()]
    logits = LOGITS.expand(5, -1)

    assert [choose(LOGITS[None], [alone])[0] for _ in range(20)] == [
        choose(logits, [*others, row])[-1] for _ in range(20)
    ]


def test_rows_with_different_parameters_share_a_batch() -> None:
    rows = [chooser(), chooser(temperature=1.0, top_k=1), chooser(answer=(0,), frequency_penalty=2.0)]

    assert choose(LOGITS.expand(3, -1), rows) == [0, 0, 1]


def test_repetition_is_penalized_in_prompt_and_answer() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])

    assert choose(logits, [chooser(prompt=(0,), repetition_penalty=1.5)]) == [1]
    assert choose(logits, [chooser(prompt=(0,), answer=(1,), repetition_penalty=0.5)]) == [0]


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = torch.tensor([[1.0, 0.0]])

    assert choose(logits, [chooser(answer=(0, 0, 0), presence_penalty=0.9)]) == [0]
    assert choose(logits, [chooser(answer=(0, 0, 0), frequency_penalty=0.9)]) == [1]


def test_choosing_leaves_the_logits_as_they_are() -> None:
    logits = LOGITS[None].clone()
    choose(logits, [chooser(answer=(0,), presence_penalty=2.0)])

    assert torch.equal(logits, LOGITS[None])


@pytest.mark.parametrize(
    ("given", "defaults", "temperature"),
    [
        ({}, {}, 0.0),
        ({}, {"do_sample": True, "temperature": 0.6}, 0.6),
        ({}, {"do_sample": True}, 1.0),
        ({"temperature": 0.0}, {"do_sample": True}, 0.0),
        ({"temperature": 0.4}, {}, 0.4),
        ({"top_p": 0.9}, {}, 1.0),
    ],
    ids=str,
)
def test_the_models_own_settings_hold_where_a_request_says_nothing(
    given: dict[str, Any], defaults: dict[str, Any], temperature: float
) -> None:
    assert Choice.of(given, defaults).temperature == temperature


def test_what_the_request_says_goes_before_the_models_settings() -> None:
    choice = Choice.of({"top_p": 0.5, "top_k": -1, "seed": 4}, {"top_p": 0.9, "top_k": 50, "min_p": 0.1})

    assert (choice.top_p, choice.top_k, choice.min_p, choice.seed) == (0.5, 0, 0.1, 4)
