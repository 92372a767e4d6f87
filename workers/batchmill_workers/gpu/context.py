"""How many tokens a model's context holds, read from its own files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .gguf import read_metadata


def context_tokens(path: Path) -> int | None:
    """The context window that a GGUF file or a model folder's config.json names; None where neither says."""
    if path.is_dir():
        return first_whole(text_config(path), "max_position_embeddings", "n_positions") or None
    return first_whole(read_metadata(path), "context_length") or None


def first_whole(values: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a whole number above 0; 0 where none is."""
    found = (values.get(name) for name in names)
    return next((one for one in found if isinstance(one, int) and not isinstance(one, bool) and one > 0), 0)


def read_json(path: Path) -> Mapping[str, Any]:
    """A table in a JSON file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_config(folder: Path) -> Mapping[str, Any]:
    """A model folder's config.json; empty where there is none that can be read."""
    return read_json(folder / "config.json")


def text_config(folder: Path) -> Mapping[str, Any]:
    """The part of config.json about the language model, which models of several kinds of input keep apart."""
    config = read_config(folder)
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
