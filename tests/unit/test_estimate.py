"""What a job would cost, told as a range before any call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchmill_core.catalog import Limits
from batchmill_core.errors import SourceError, UserError
from batchmill_core.request import TaskKind
from batchmill_producers.estimate import Estimate, estimate
from batchmill_producers.submit import Submission
from tests.mill import MODEL, catalog_for, settings_for

CASES = Path(__file__).parents[1] / "cases" / "inputs"
ROWS = [{"text": "a great product, I love it"}] * 10


def estimated(folder: Path, dataset: Any = ROWS, catalog: Any = None, **options: Any) -> Estimate:
    settings = settings_for(folder, catalog_for() if catalog is None else catalog)
    given = {"model": MODEL, "prompt": "Label: {{ text }}", "params": {"max_tokens": 20}, **options}
    return estimate(settings, Submission(dataset=dataset, **given))


def test_rows_tokens_and_cost_are_ranges(tmp_path: Path) -> None:
    found = estimated(tmp_path)

    assert (found.rows, found.skipped) == (10, 0)
    assert 0 < found.input_tokens[0] < found.input_tokens[1]
    assert found.output_tokens == (10, 200)
    assert found.cost_nanousd is not None
    assert 0 < found.cost_nanousd[0] < found.cost_nanousd[1]


def test_what_a_row_of_known_length_needs_lies_in_the_range(tmp_path: Path) -> None:
    low, high = estimated(tmp_path, [{"text": "one two three four five six seven eight"}]).input_tokens

    assert low <= 17 <= high  # ten of the text, about seven around it


def test_the_json_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    shown = estimated(tmp_path).as_dict()

    assert set(shown) == {"rows", "skipped", "tokens", "cost_usd", "seconds", "problems"}
    assert set(shown["tokens"]) == set(shown["cost_usd"]) == {"low", "high"}
    assert isinstance(shown["cost_usd"]["low"], str)


def test_without_a_price_the_cost_is_unknown_and_not_zero(tmp_path: Path) -> None:
    found = estimated(tmp_path, catalog=catalog_for(price=None))

    assert found.cost_nanousd is None
    assert found.as_dict()["cost_usd"] == {"low": None, "high": None}
    assert "no known price" in found.problems[0]


def test_embeddings_have_no_output(tmp_path: Path) -> None:
    assert estimated(tmp_path, task=TaskKind.EMBED, params={}).output_tokens == (0, 0)


def test_an_answer_of_any_length_is_guessed_generously(tmp_path: Path) -> None:
    low, high = estimated(tmp_path, params={}).output_tokens

    assert high >= 100 * low


def test_rows_of_a_batch_file_bring_their_own_longest_answer(tmp_path: Path) -> None:
    found = estimated(tmp_path, CASES / "openai-batch.jsonl", prompt=None)

    assert found.rows == 3


@pytest.mark.parametrize(
    ("limits", "least_s"),
    [
        (Limits(), 0.7),
        (Limits(requests_per_minute=60), 10),
        (Limits(requests_per_second=2), 5),
        (Limits(tokens_per_minute=60), 60),
    ],
)
def test_the_accounts_limits_say_how_long_it_takes_at_least(tmp_path: Path, limits: Limits, least_s: float) -> None:
    found = estimated(tmp_path, catalog=catalog_for(limits=limits))

    assert found.seconds is not None
    assert found.seconds[0] <= found.seconds[1]
    assert found.seconds[0] >= least_s


def test_a_bad_line_is_told_as_submit_would(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="3"):
        estimated(tmp_path, CASES / "bad-line-3.jsonl")


def test_skipped_lines_are_counted_and_listed(tmp_path: Path) -> None:
    found = estimated(tmp_path, CASES / "bad-line-3.jsonl", skip_bad_rows=True)

    assert (found.rows, found.skipped) == (3, 1)
    assert any("line 3" in p for p in found.problems)


def test_a_missing_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="text"):
        estimated(tmp_path, [{"other": "x"}])


def test_nothing_is_written(tmp_path: Path) -> None:
    estimated(tmp_path)

    assert list(tmp_path.iterdir()) == []
