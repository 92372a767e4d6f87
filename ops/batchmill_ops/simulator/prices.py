"""The simulated models and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from batchmill_core.usage import Price

CHAT_MODEL = "sim-chat"
EMBED_MODEL = "sim-embed"

USD_PER_MTOK: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        CHAT_MODEL: {"input": "0.40", "cached_input": "0.10", "output": "1.60"},
        EMBED_MODEL: {"input": "0.02"},
    }
)
PRICES: Mapping[str, Price] = MappingProxyType(
    {model: Price.from_usd_per_mtok(usd, version="simulator") for model, usd in USD_PER_MTOK.items()}
)
