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
        found = text_config(path).get("max_position_embeddings")
    else:
        found = read_metadata(path).get("context_length")
    return found if isinstance(found, int) else None


def read_config(folder: Path) -> Mapping[str, Any]:
    """A model folder's config.json; empty where there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def text_config(folder: Path) -> Mapping[str, Any]:
    """The part of config.json about the language model, which models of several kinds of input keep apart."""
    config = read_config(folder)
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
