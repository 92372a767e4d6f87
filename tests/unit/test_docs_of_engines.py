"""What docs/engines.md says of the engines is what the code takes."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.settings import load_settings
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.server_options import PLACES, ServerOptions
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.vllm_options import VllmOptions

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
OPTIONS: dict[str, type[Any]] = {
    "openvino": OpenVinoOptions,
    "transformers": TransformersOptions,
    "server": ServerOptions,
    "vllm": VllmOptions,
}


def _section(engine: str) -> str:
    return PAGE.partition(f"\n## {engine}\n")[2].partition("\n## ")[0]


def _described(engine: str) -> list[str]:
    """The names in the first cells of the rows of the table of options."""
    table = _section(engine).partition("| option |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", table, re.M)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize("engine", OPTIONS)
def test_its_examples_are_taken_as_they_stand(engine: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", _section(engine), re.S)
    (tmp_path / "batchmill.toml").write_text(example)
    models = load_settings(tmp_path, {}).catalog.models

    assert models
    for entry in models.values():
        assert entry.engine == engine
        assert OPTIONS[engine].parse(entry.options, model=entry.name)


@pytest.mark.parametrize("engine", OPTIONS)
def test_every_option_is_described_once_and_no_other(engine: str) -> None:
    assert sorted(_described(engine)) == sorted(one.name for one in fields(OPTIONS[engine]))


@pytest.mark.parametrize("engine", ["openvino", "transformers", "server"])
def test_a_default_that_is_told_is_the_one_that_holds(engine: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`?(\"\w+\"|\d+|true|false)`?) \|", _section(engine), re.M)
    defaults = {one.name: one.default for one in fields(OPTIONS[engine])}

    assert rows
    for name, told in rows:
        assert tomllib.loads(f"told = {told}")["told"] == defaults[name], name


def test_every_placeholder_of_a_command_is_described_and_no_other() -> None:
    assert set(re.findall(r"^\| `\{([a-z_]+)\}` \|", _section("server"), re.M)) == set(PLACES)
