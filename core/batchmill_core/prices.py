"""The price of a model: from the catalogue, else from the snapshot of list prices in the package genai-prices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from typing import TYPE_CHECKING

from .catalog import Account, ModelEntry
from .usage import Price

if TYPE_CHECKING:
    from genai_prices.types import ConditionalPrice, ModelPrice, TieredPrices

_MICRO = Decimal("0.000001")
_KEYS = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cached_input": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "reasoning": "output_reasoning_mtok",
}


def price_for(account: Account | None, entry: ModelEntry, *, at: datetime | None = None) -> Price | None:
    """The price of ``entry``, or None when nobody knows it; unknown is not zero.

    The catalogue's price wins. A list price is looked up by the account's address and the provider's name for the
    model, as of ``at`` (default: now), and only at the provider itself: a reseller or a server on this host has its
    own prices. Where prices differ by prompt length the base tier counts; where they differ by time of day, the dearest.
    """
    if entry.price is not None or account is None:
        return entry.price
    return list_price(account.base_url, entry.upstream, at=at or datetime.now(UTC))


def list_price(base_url: str, upstream: str, *, at: datetime) -> Price | None:
    """The list price at the provider behind ``base_url`` for ``upstream``, or None."""
    import genai_prices
    from genai_prices.data_snapshot import get_snapshot

    try:
        _, model = get_snapshot().find_provider_model(upstream, None, None, base_url)
    except LookupError:
        return None
    prices = model.prices if isinstance(model.prices, list) else None
    current = model.get_prices(at) if prices is None else _dearest_of_the_day(prices, at)
    return translated(current, version=f"genai-prices {genai_prices.__version__}")


def _dearest_of_the_day(prices: Sequence[ConditionalPrice], at: datetime) -> ModelPrice:
    """A job keeps one price and may run at any hour, so that the dearest hour counts (budgets must hold)."""
    from genai_prices.types import TimeOfDateConstraint

    by_hour = [p.prices for p in prices if isinstance(p.constraint, TimeOfDateConstraint)]
    by_date = [p for p in prices if not isinstance(p.constraint, TimeOfDateConstraint)]
    started = [p.prices for p in by_date if p.constraint is None or p.constraint.active(at)]
    now = started[-1:] or [prices[0].prices]
    return max([*now, *by_hour], key=lambda p: _usd(p.input_mtok) + _usd(p.output_mtok))


def translated(price: ModelPrice, *, version: str) -> Price | None:
    """``price`` as a Price; None without a price per input token, or with a fee per request, which a Price cannot say."""
    if price.input_mtok is None or price.requests_kcount is not None:
        return None
    given = {kind: getattr(price, key) for kind, key in _KEYS.items()}
    # A few list prices are quotients with endless decimals; a millionth of a USD per million tokens is the finest step.
    usd = {kind: _usd(value).quantize(_MICRO, ROUND_HALF_EVEN) for kind, value in given.items() if value is not None}
    return Price.from_usd_per_mtok(usd, version=version)


def _usd(price: Decimal | TieredPrices | None) -> Decimal:
    if price is None:
        return Decimal(0)
    return price if isinstance(price, Decimal) else price.base
