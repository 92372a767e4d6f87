"""The checks of models that run here: is the engine installed, do its options fit, are the files there to be opened."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import engine_class
from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.fit import without_check
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.sources import resolve_source
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.vllm_options import VllmOptions
from batchmill_workers.gpu.whole_files import cut_short

from .doctor_check import Check, fail, ok, refused
from .doctor_server import check_server

# What an engine imports when it starts, and the extra that brings it.
_NEEDS = {
    "openvino": ("openvino_genai", "local"),
    "vllm": ("vllm", "vllm"),
    "transformers": ("transformers", "transformers"),
}
_OPTIONS: dict[str, type[OpenVinoOptions | VllmOptions | TransformersOptions]] = {
    "openvino": OpenVinoOptions,
    "vllm": VllmOptions,
    "transformers": TransformersOptions,
}


def check_model(model: ModelEntry) -> Check:
    """Whether the engine of a model that runs here is installed, its options fit and its files are there."""
    name, engine, source = f"model {model.name}", model.engine or "", model.source or ""
    try:
        engine_class(engine)
    except ConfigurationError as fault:
        return refused(name, fault)
    except ImportError as fault:
        return _not_installed(name, engine, fault.name or "")
    if engine == "server":
        return check_server(model)
    module, _ = _NEEDS.get(engine, ("", ""))
    if module and not _is_there(module):
        return _not_installed(name, engine, module)
    try:
        _check_options(model)
    except ConfigurationError as fault:
        return refused(name, fault)
    if not source:  # an engine of the user's own
        return ok(name, engine)
    if source.startswith("hf:"):
        return ok(name, f"{engine}, {source} (looked up when loaded)")
    return _check_files(name, engine, source)


def _check_options(model: ModelEntry) -> None:
    """Raises ConfigurationError for what the engine would refuse when it is made."""
    kind = _OPTIONS.get(model.engine or "")
    if kind is not None:
        kind.parse(without_check(model)[0].options, model=model.name)


def _not_installed(name: str, engine: str, missing: str) -> Check:
    _, extra = _NEEDS.get(engine, ("", engine))
    return fail(
        name, f"engine {engine} is not installed (there is no {missing})", f"`pip install 'batchmill[{extra}]'`"
    )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # somebody put a stand-in into sys.modules
        return False


def _check_files(name: str, engine: str, source: str) -> Check:
    try:
        path = resolve_source(source)
    except ConfigurationError as fault:
        found = refused(name, fault)
        return found if found.advice else replace(found, advice="put it there, or correct source in batchmill.toml")
    if engine == "openvino" and path.suffix == ".gguf" and not os.access(path, os.W_OK):
        return fail(
            name,
            f"OpenVINO opens GGUF files for writing, and {path} may not be written to by you",
            _make_writable(path),
        )
    if (cut := cut_short(path)) is not None:
        detail, _, advice = cut.partition("; ")
        return fail(name, detail, advice)
    return ok(name, f"{engine}, {path.name} is there")


def _make_writable(path: Path) -> str:
    if path.stat().st_uid == os.geteuid():
        return f"`chmod u+w {path}`"
    return f'`sudo chown "$USER" {path}`, or copy it and name the copy as source: `cp {path} .`'
