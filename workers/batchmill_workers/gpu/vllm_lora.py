"""LoRA adapters of a vLLM engine: which one a request names, and what vLLM must know to load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError, InvalidRequest

# The ranks that vLLM reserves memory for. Source: vllm/config/lora.py, MaxLoRARanks.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_MOST_IN_ONE_BATCH = 8


def chosen(asked: Any, *, upstream: str, names: Mapping[str, Any]) -> str | None:
    """The adapter that answers a request: the one that parameter ``lora`` names, else that of the model's own name.

    None means the model without an adapter. Raises InvalidRequest for a name that is not configured.
    """
    if asked is None:
        return upstream if upstream in names else None
    if asked not in names:
        raise InvalidRequest(
            f"parameter lora: the model has no adapter {asked!r}{nearest(str(asked), names)} "
            "Adapters are named under options.lora of the model's entry."
        )
    return str(asked)


def lora_args(adapters: Mapping[str, Path], *, max_rank: int | None, on_cpu: bool) -> dict[str, Any]:
    """Arguments for vLLM's engine. Raises ConfigurationError for a folder that holds no adapter.

    On the processor one place more than there are adapters stays empty: vLLM 0.32 computes a row without an adapter
    by the last place (it indexes torch's weights with -1) as soon as another row of the batch has one.
    """
    if not adapters:
        return {}
    places = len(adapters) + 1 if on_cpu else min(len(adapters), _MOST_IN_ONE_BATCH)
    largest = max(_rank(name, path) for name, path in adapters.items())
    return {
        "enable_lora": True,
        "max_lora_rank": max_rank or reserved_rank(largest),
        "max_loras": places,
        "max_cpu_loras": max(places, len(adapters)),
    }


def reserved_rank(rank: int) -> int:
    """The least rank that vLLM can reserve memory for and that holds ``rank``."""
    return next((one for one in RANKS if one >= rank), rank)


def _rank(name: str, path: Path) -> int:
    try:
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"options.lora.{name}: {path} is no LoRA adapter; it needs an adapter_config.json that names its rank r"
        ) from error
    return int(rank)
