"""An engine of somebody else's: an installed package that registers it, for this process and its workers."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest


def install_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, *, entry: str, code: str | None = None) -> Path:
    """Installs into ``folder``, which is answered: a worker finds the engine with it as its PYTHONPATH.

    ``entry`` is the entry point, ``NAME = MODULE:CLASS``; ``code`` is the module's, None where it is there already.
    """
    name, _, target = entry.partition(" = ")
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    if code is not None:
        (folder / f"{target.partition(':')[0]}.py").write_text(textwrap.dedent(code))
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[batchmill.engines]\n{entry}\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder
