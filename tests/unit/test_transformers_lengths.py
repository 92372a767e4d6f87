"""How long a text a model reads, by what its files tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from batchmill_workers.gpu.transformers_lengths import least_length, rope_turn

LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def model(**settings: Any) -> Any:
    config = SimpleNamespace(max_position_embeddings=131_072, **settings)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))


@pytest.mark.parametrize(
    ("told", "least"), [((None, 512, 514), 512), ((-1, 10**30), None), ((0, 8192, None), 8192), ((), None)], ids=str
)
def test_the_least_length_is_of_those_that_are_any(told: tuple[int | None, ...], least: int | None) -> None:
    assert least_length(*told) == least


@pytest.mark.parametrize(
    ("settings", "turn"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": None}, None),
        ({}, None),
        ({"rope_parameters": LONGROPE}, 4096),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 131_072),
        ({"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}}, 4096),
    ],
    ids=str,
)
def test_a_model_turns_to_other_positions_where_its_settings_say(settings: dict[str, Any], turn: int | None) -> None:
    assert rope_turn(model(**settings)) == turn
