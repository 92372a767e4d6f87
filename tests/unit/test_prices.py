"""List prices are found at the provider itself, converted exactly, and never guessed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from genai_prices import __version__ as snapshot_version
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import ConditionalPrice, ModelPrice

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.prices import list_price, price_for, translated
from batchmill_core.usage import Price

NOW = datetime(2026, 11, 30, 3, tzinfo=UTC)
OPENAI = Account(name="openai", base_url="https://api.openai.com/v1")


def test_the_price_of_the_catalogue_wins() -> None:
    own = Price(input=1, output=2)

    assert price_for(OPENAI, ModelEntry(name="gpt-4.1-mini", account="openai", price=own)) == own


def test_a_list_price_is_found_by_the_providers_name_for_the_model() -> None:
    entry = ModelEntry(name="mini", account="openai", model="gpt-4.1-mini-2025-04-14")

    assert price_for(OPENAI, entry, at=NOW) == Price(
        input=400_000, cached_input=100_000, output=1_600_000, version=f"genai-prices {snapshot_version}"
    )


def test_where_prices_differ_by_prompt_length_the_base_tier_counts() -> None:
    price = list_price("https://generativelanguage.googleapis.com/v1beta/openai", "gemini-2.5-pro", at=NOW)

    assert price is not None
    assert (price.input, price.output) == (1_250_000, 10_000_000)


@pytest.mark.parametrize("hour", [3, 20])
def test_where_prices_differ_by_time_of_day_the_dearest_counts(hour: int) -> None:
    price = list_price("https://api.deepseek.com", "deepseek-chat", at=NOW.replace(hour=hour))

    assert price is not None
    assert (price.input, price.cached_input, price.output) == (270_000, 70_000, 1_100_000)


@pytest.mark.parametrize(
    ("base_url", "model"),
    [
        ("https://api.openai.com/v1", "no-such-model"),
        ("http://127.0.0.1:8000/v1", "gpt-4.1-mini"),
        ("http://localhost:11434/v1", "gpt-4.1-mini"),
        ("https://reseller.example/v1", "gpt-4.1-mini"),
        ("https://api.perplexity.ai", "sonar"),  # has a fee per request beside its tokens
    ],
)
def test_a_price_that_nobody_knows_is_unknown(base_url: str, model: str) -> None:
    assert list_price(base_url, model, at=NOW) is None


def test_a_model_on_an_engine_here_has_no_list_price() -> None:
    assert price_for(None, ModelEntry(name="gpt-4.1-mini", engine="openvino", source="hf:a/b")) is None


def test_every_list_price_of_the_snapshot_can_be_read() -> None:
    broken = []
    for provider in get_snapshot().providers:
        for model in provider.models:
            for price in _prices(model.prices):
                if price.input_mtok is not None and price.requests_kcount is None:
                    found = translated(price, version="test")
                    broken += [] if found is not None and found.input >= 0 else [f"{provider.id} {model.id}"]

    assert broken == []


def _prices(prices: ModelPrice | list[ConditionalPrice]) -> list[ModelPrice]:
    return [p.prices for p in prices] if isinstance(prices, list) else [prices]
