"""What docs/engines.md says of the engine ``server`` is what the code takes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from batchmill_core.settings import load_settings
from batchmill_workers.gpu.server_options import PLACES, ServerOptions

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
SECTION = PAGE.partition("\n## server\n")[2].partition("\n## ")[0]


def _first_cells(text: str) -> set[str]:
    return set(re.findall(r"^\| `\{?([a-z_]+)\}?` \|", text, re.M))


def test_its_examples_are_taken_as_they_stand(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", SECTION, re.S)
    (tmp_path / "batchmill.toml").write_text(example)
    models = load_settings(tmp_path, {}).catalog.models

    assert len(models) == 4
    for entry in models.values():
        assert ServerOptions.parse(entry.options, model=entry.name).command


def test_every_option_and_placeholder_is_described_and_no_other() -> None:
    assert _first_cells(SECTION) == {one.name for one in fields(ServerOptions)} | set(PLACES)
