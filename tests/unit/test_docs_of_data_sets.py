"""docs/data-sets.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchmill.job_file import with_job_file
from batchmill_producers.export import FORMATS
from batchmill_producers.source_files import FORMATS as SUFFIXES
from tests.unit.test_table_sources import FORMS

PAGE = (Path(__file__).parents[2] / "docs" / "data-sets.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_suffix_is_listed() -> None:
    listed = set(re.findall(r"`(\.[a-z]+)`", section("What can be read")))

    assert listed == {*SUFFIXES, ".gz", ".zst"}


def test_every_format_is_listed() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", section("Results"), re.M)) == FORMATS


def test_the_examples_of_forms_are_those_of_the_tests() -> None:
    shown = re.findall(r"^\|.*\| `(.+)` \|$", section("What values become"), re.M)
    forms = {str(form).replace("None", "null").replace("'", '"').replace(" ", "") for _, _, form in FORMS}

    assert shown
    assert {s.replace(" ", "") for s in shown} <= forms


def test_the_job_file_can_be_read(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(section("Job files").partition("```toml\n")[2].partition("```")[0])

    found = with_job_file({"dataset": str(job), "model": None, "param": None}, is_given=lambda _: False)

    assert found["model"] == "gpt-4.1-mini"
    assert found["param"] == ["max_tokens=5", "temperature=0"]


@pytest.mark.parametrize("start", ["=", "+", "-", "@"])
def test_what_excel_safe_mends_is_said(start: str) -> None:
    assert f"`{start}`" in section("Results")
