"""Every gate is seen to fail on a planted fault, so that its silence means something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
PACKAGES = {
    "batchmill": ".",
    "batchmill_core": "core",
    "batchmill_db": "db",
    "batchmill_producers": "producers",
    "batchmill_workers": "workers",
    "batchmill_workers/api": "workers",
    "batchmill_workers/gpu": "workers",
    "batchmill_ops": "ops",
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Our packages, empty, under the real contracts."""
    for package, folder in PACKAGES.items():
        (tmp_path / folder / package).mkdir(parents=True)
        (tmp_path / folder / package / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_bytes(PYPROJECT.read_bytes())
    return tmp_path


def run(tool: str, *arguments: str | Path, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name(tool), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def lint_imports(house: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(house / folder) for folder in dict.fromkeys(PACKAGES.values()))
    return run("lint-imports", "--no-cache", cwd=house, path=path)


def test_imports_that_run_one_way_pass(house: Path) -> None:
    (house / "workers/batchmill_workers/tasks.py").write_text("import batchmill_db\n")
    (house / "db/batchmill_db/schema.py").write_text("import sqlalchemy\n")

    result = lint_imports(house)

    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("file", "fault", "broken"),
    [
        ("core/batchmill_core/job.py", "import batchmill_db", "Imports run one way"),
        ("workers/batchmill_workers/tasks.py", "import batchmill_producers", "Imports run one way"),
        ("producers/batchmill_producers/submit.py", "import sqlalchemy", "Only db speaks SQL"),
        ("workers/batchmill_workers/api/engine.py", "import batchmill_workers.gpu", "The wings do not know each other"),
        ("workers/batchmill_workers/gpu/meter.py", "import batchmill_workers.api", "The wings do not know each other"),
    ],
)
def test_an_import_against_the_direction_fails(house: Path, file: str, fault: str, broken: str) -> None:
    (house / file).write_text(f"{fault}\n")

    result = lint_imports(house)

    assert result.returncode != 0
    assert any(broken in line and "BROKEN" in line for line in result.stdout.splitlines()), result.stdout


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ('print("talk")\n', "T201"),
        ("try:\n    pass\nexcept Exception:\n    pass\n", "BLE001"),
        ("import os\n", "F401"),
    ],
)
def test_a_fault_of_style_fails(tmp_path: Path, fault: str, rule: str) -> None:
    (tmp_path / "planted.py").write_text(fault)

    result = run("ruff", "check", "--no-cache", "--config", PYPROJECT, "planted.py", cwd=tmp_path)

    assert result.returncode == 1
    assert rule in result.stdout


def test_unformatted_code_fails(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("x = {'a':1}\n")

    result = run("ruff", "format", "--check", "--no-cache", "--config", PYPROJECT, "planted.py", cwd=tmp_path)

    assert result.returncode == 1


def test_a_missing_or_wrong_type_fails(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("def f(x):\n    return x\n\n\ny: int = 'one'\n")

    result = run("mypy", "--config-file", PYPROJECT, "--cache-dir", tmp_path, "planted.py", cwd=tmp_path)

    assert result.returncode == 1
    assert "[no-untyped-def]" in result.stdout
    assert "[assignment]" in result.stdout


def test_a_warning_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text("import warnings\n\n\ndef test_it():\n    warnings.warn('old')\n")

    result = run("pytest", "-q", "-c", PYPROJECT, "--rootdir", tmp_path, tmp_path, cwd=tmp_path)

    assert result.returncode == 1
    assert "UserWarning: old" in result.stdout
