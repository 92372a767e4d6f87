"""Choosing tokens: each sampling parameter leaves in what it should, and rows do not touch each other."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from batchmill_workers.gpu.transformers_choice import Choice, Chooser, Choosing  # noqa: E402

LIKELY = [0.5, 0.3, 0.15, 0.05]
LOGITS = torch.tensor(LIKELY).log()
DRAWS = 400


def chooser(*, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), seed: int = 1, **settings: Any) -> Chooser:
    return Chooser(choice=Choice(**settings), prompt=prompt, answer=answer, random=random.Random(seed))


def choose(logits: torch.Tensor, rows: list[Chooser]) -> list[int]:
    tokens: list[int] = Choosing(rows, logits.device).choose(logits).tolist()
    return tokens


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


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.8, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 1.5, "top_p": 0.999},  # more tokens than are looked at first
    {},
)


class Fixed(random.Random):
    """Always the same number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number


def expected(logits: list[float], number: float, choice: Choice) -> int:
    """The token that one row draws, worked out one token at a time."""
    if choice.temperature == 0:
        return max(range(len(logits)), key=lambda token: logits[token])
    weights = {token: math.exp(one / choice.temperature) for token, one in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: -weights[token])[: choice.top_k or len(logits)]
    whole, before, kept = sum(weights[token] for token in ranked), 0.0, set()
    for token in ranked:
        if before < choice.top_p and weights[token] >= choice.min_p * weights[ranked[0]]:
            kept.add(token)
        before += weights[token] / whole
    order = ranked if choice.top_k or choice.top_p < 1 else range(len(logits))
    left = number * sum(weights[token] for token in kept)
    for token in (one for one in order if one in kept):
        left -= weights[token]
        if left < 0:
            return token
    raise AssertionError("the number is 1 or more")


@pytest.mark.parametrize("number", [0.0, 0.31, 0.72, 0.95])
def test_each_kind_of_choice_draws_what_the_definition_says_alone_or_among_all_others(number: float) -> None:
    torch.manual_seed(3)
    logits = torch.randn(len(KINDS), 3000) * 2
    rows = [Chooser(choice=Choice(**kind), prompt=(), answer=(), random=Fixed(number)) for kind in KINDS]
    wanted = [expected(one.tolist(), number, row.choice) for one, row in zip(logits, rows, strict=True)]

    assert choose(logits, rows) == wanted
    assert [choose(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == wanted


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_that_is_forbidden_is_never_drawn(kind: dict[str, Any]) -> None:
    """Not even by the number below 1 that is 1 in single precision."""
    logits = torch.randn(1, 3000)
    logits[:, ::2] = logits[:, 2500:] = float("-inf")
    row = Chooser(choice=Choice(**kind), prompt=(), answer=(), random=Fixed(1 - 2**-53))

    assert logits[0, choose(logits, [row])[0]] > float("-inf")


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


def test_what_a_row_has_said_since_its_batch_began_is_penalized_as_if_it_had_been_asked_with_it() -> None:
    torch.manual_seed(4)
    steps = torch.randn(6, 3, 12)
    settings = ({"repetition_penalty": 1.7}, {}, {"frequency_penalty": 0.4, "presence_penalty": 0.6})
    rows = [chooser(prompt=(0, 3), **one) for one in settings]
    choosing = Choosing(rows, steps.device)
    said: list[tuple[int, ...]] = [(), (), ()]
    for logits in steps:
        anew = [chooser(prompt=(0, 3), answer=s, **one) for s, one in zip(said, settings, strict=True)]
        chosen = choosing.choose(logits).tolist()

        assert chosen == choose(logits, anew)
        said = [(*before, token) for before, token in zip(said, chosen, strict=True)]


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
