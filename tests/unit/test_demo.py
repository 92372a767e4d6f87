"""What the demonstration tells to type next works where it tells it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchmill.demo import _command


@pytest.mark.parametrize(
    ("python", "typed"),
    [(".venv/bin/python", "../.venv/bin/batchmill"), ("/opt/mill/bin/python", "/opt/mill/bin/batchmill")],
)
def test_the_command_is_named_from_the_folder_of_the_demonstration(
    python: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / python))  # an absolute path stays one

    assert _command() == typed
