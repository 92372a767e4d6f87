"""The engine of the user's own in docs/engines.md, installed and run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.integration.plugin_engine import install_engine

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text().partition("\n## an engine of your own\n")[2]


def block(language: str) -> str:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return found[0]


def test_the_engine_shown_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, target),) = tomllib.loads(block("toml"))["project"]["entry-points"]["batchmill.engines"].items()
    plugins = install_engine(tmp_path / "plugins", monkeypatch, entry=f"{name} = {target}", code=block("python"))
    command = next(line for line in block("sh").splitlines() if line.startswith("batchmill"))
    home = tmp_path / "home"
    home.mkdir()
    (home / "reviews.jsonl").write_text('{"text": "good lamp"}\n{"text": ""}\n')
    (home / "batchmill.toml").write_text(
        f'[models.loud]\nengine = "{name}"\ndevice_usd_per_hour = 3600000\noptions = {{ suffix = "!!" }}\n'
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    arguments = [*shlex.split(command)[1:], "-o", "out.jsonl"]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "batchmill.cli", *arguments],
        cwd=home,
        env={**clean, "PYTHONPATH": str(plugins)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    lines = [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]
    assert [(one["status"], one["output"]) for one in lines] == [("ok", "GOOD LAMP!!"), ("failed", None)], ran.stderr
    assert lines[1]["error"] == {"kind": "invalid_request", "message": "there is nothing to shout"}
    assert float(lines[0]["cost_usd"]) > 0
