"""How long a text a model reads, and from which length on it reads all texts of a batch differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def least_length(*told: int | None) -> int | None:
    """The least of the lengths that files tell; None where none does. For no limit they write -1 or 10**30."""
    return min((one for one in told if one is not None and 0 < one < _NO_LIMIT), default=None)


_NO_LIMIT = 1 << 30


def learned_positions(model: Any) -> int | None:
    """How many tokens a model with a table of positions can read; None for one that computes them.

    Some tables begin with places that no token gets: RoBERTa's up to the one for padding, BART's and OPT's first two.
    """
    for name, table in model.named_modules():
        if name.rpartition(".")[2] in _POSITION_TABLES and isinstance(table, torch.nn.Embedding):
            unused = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
            return int(table.num_embeddings) - int(unused)
    return None


_POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")


def rope_turn(model: Any) -> int | None:
    """The length beyond which a model turns to other rotary positions; None: it never does.

    longrope (Phi-3) and dynamic NTK look at the longest row of a step, and turn for all of its rows: a short one beside it
    is read as no one alone would be.
    """
    config = model.config.get_text_config()
    told = getattr(config, "rope_parameters", None) or {}
    kinds = [
        told,
        *(one for one in told.values() if isinstance(one, Mapping)),
    ]  # by kind of layer, where there are several
    turning = next((one for one in kinds if one.get("rope_type") in _TURNING), None)
    if turning is None:
        return None
    named = turning.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return least_length(named or config.max_position_embeddings)


_TURNING = ("dynamic", "longrope")
