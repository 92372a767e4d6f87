"""The data set of examples/ is what its README says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def reviews() -> list[dict[str, Any]]:
    lines = (EXAMPLES / "reviews.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def test_there_are_as_many_reviews_and_languages_as_the_readme_says(reviews: list[dict[str, Any]]) -> None:
    said = re.search(r"(\d+) product reviews in (\d+) languages", (EXAMPLES / "README.md").read_text(encoding="utf-8"))

    assert said is not None
    assert [len(reviews), len({r["lang"] for r in reviews})] == [int(n) for n in said.groups()]


def test_every_review_has_the_columns_and_a_text_and_id_of_its_own(reviews: list[dict[str, Any]]) -> None:
    assert all(list(r) == ["id", "lang", "product", "text", "stars"] for r in reviews)
    assert all(r["text"].strip() and r["stars"] in (1, 2, 3, 4, 5) for r in reviews)
    assert len({r["id"] for r in reviews}) == len({r["text"] for r in reviews}) == len(reviews)


@pytest.mark.parametrize("trick", ["\n", "{{", "{%", '"', "\\", "<br>", "🔥", "א", "ا", "Ignore all previous"])
def test_what_breaks_careless_programs_is_there(reviews: list[dict[str, Any]], trick: str) -> None:
    assert any(trick in r["text"] for r in reviews)


def test_the_texts_go_from_one_character_to_a_page(reviews: list[dict[str, Any]]) -> None:
    lengths = [len(r["text"]) for r in reviews]

    assert min(lengths) == 1
    assert max(lengths) > 1000
