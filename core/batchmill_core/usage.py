"""Usage, Price and cost in integer nano-USD.

One nano-USD is 1e-9 US dollars. A price is held as an integer number of pico-USD (1e-12 USD) per token, which is
the same number as micro-USD per million tokens, so that every published price is exact. A cost is multiplied and
summed in integers and rounded half-even to nano-USD once per call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation

NANO = 1_000_000_000
_PICO_PER_NANO = 1000
TOKEN_KINDS = ("input", "cached_input", "cache_write", "output", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call, counted as OpenAI-compatible APIs count them.

    ``input`` includes ``cached_input`` and ``cache_write``; ``output`` includes ``reasoning``. A call whose provider
    reported nothing has no Usage at all (``None``): unknown is not zero.
    """

    input: int = 0
    cached_input: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{k: getattr(self, k) + getattr(other, k) for k in TOKEN_KINDS})

    @property
    def total(self) -> int:
        return self.input + self.output

    def as_dict(self) -> dict[str, int]:
        return {k: getattr(self, k) for k in TOKEN_KINDS}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Usage:
        return cls(**{k: int(data.get(k, 0)) for k in TOKEN_KINDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of one model in pico-USD per token (equal to micro-USD per million tokens).

    A kind that has no price of its own costs what the kind that contains it costs: cached input and cache writes cost
    ``input``, reasoning costs ``output``. ``version`` names where the figure came from.
    """

    input: int
    output: int
    cached_input: int | None = None
    cache_write: int | None = None
    reasoning: int | None = None
    version: str = "catalogue"

    @classmethod
    def from_usd_per_mtok(cls, prices: Mapping[str, object], *, version: str = "catalogue") -> Price:
        """Reads ``{"input": 0.40, "cached_input": 0.10, "output": 1.60}``, USD per million tokens.

        Numbers may be int, float, Decimal or decimal strings. Raises ValueError naming the key that is unknown, missing
        or not a finite number of at least zero with at most six decimals.
        """
        unknown = sorted(set(prices) - set(TOKEN_KINDS))
        if unknown:
            raise ValueError(f"price has no kind {unknown[0]!r}; it knows {', '.join(TOKEN_KINDS)}")
        parsed = {k: _pico(k, v) for k, v in prices.items() if v is not None}
        if "input" not in parsed:
            raise ValueError("price needs 'input', in USD per million tokens")
        return cls(
            input=parsed["input"],
            output=parsed.get("output", 0),
            cached_input=parsed.get("cached_input"),
            cache_write=parsed.get("cache_write"),
            reasoning=parsed.get("reasoning"),
            version=version,
        )

    def as_dict(self) -> dict[str, int | str | None]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Price:
        return cls(**{f.name: data.get(f.name) for f in fields(cls) if f.name in data})  # type: ignore[arg-type]  # JSON border: written by as_dict


def cost(usage: Usage, price: Price) -> int:
    """Cost of one call in nano-USD, rounded half-even once."""
    cached_price = price.input if price.cached_input is None else price.cached_input
    write_price = price.input if price.cache_write is None else price.cache_write
    reasoning_price = price.output if price.reasoning is None else price.reasoning
    plain_input = max(0, usage.input - usage.cached_input - usage.cache_write)
    plain_output = max(0, usage.output - usage.reasoning)
    pico = (
        plain_input * price.input
        + usage.cached_input * cached_price
        + usage.cache_write * write_price
        + plain_output * price.output
        + usage.reasoning * reasoning_price
    )
    return round_half_even(pico, _PICO_PER_NANO)


def upper_bound(price: Price, *, input_tokens: int, output_tokens: int) -> int:
    """The most that a call of at most these tokens can cost, in nano-USD (rounded up).

    Takes the dearest price that a token of each kind can have.
    """
    dearest_input = max(price.input, price.cached_input or 0, price.cache_write or 0)
    dearest_output = max(price.output, price.reasoning or 0)
    pico = input_tokens * dearest_input + output_tokens * dearest_output
    return -(-pico // _PICO_PER_NANO)


def round_half_even(numerator: int, denominator: int) -> int:
    """Integer division of non-negative integers, rounded half to even."""
    quotient, rest = divmod(numerator, denominator)
    twice = 2 * rest
    if twice > denominator or (twice == denominator and quotient % 2 == 1):
        quotient += 1
    return quotient


def split(total: int, weights: Sequence[int]) -> list[int]:
    """Splits ``total`` in proportion to ``weights`` by largest remainder, so that the parts sum to ``total``.

    With all weights zero the parts are as equal as integers allow. Ties go to the earlier part. Source: Hamilton's
    method of apportionment.
    """
    if not weights:
        return []
    whole = sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    parts = [total * w // whole for w in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def split_usage(usage: Usage, weights: Sequence[int]) -> list[Usage]:
    """Splits a call's usage over its rows so that every kind sums exactly to the call's."""
    columns = {k: split(getattr(usage, k), weights) for k in TOKEN_KINDS}
    return [Usage(**{k: columns[k][i] for k in TOKEN_KINDS}) for i in range(len(weights))]


def usd(nanousd: int | None) -> str | None:
    """Decimal string of an amount: ``104000`` is ``"0.000104"``, ``None`` stays ``None``."""
    if nanousd is None:
        return None
    sign, digits = ("-" if nanousd < 0 else ""), abs(nanousd)
    text = f"{digits // NANO}.{digits % NANO:09d}".rstrip("0").rstrip(".")
    return sign + text


def dollars(nanousd: int | None) -> str:
    """``$12.35`` from a dollar on, below it four significant digits at most: ``$0.0041``; unknown is a dash."""
    if nanousd is None:
        return "–"
    if nanousd == 0:
        return "$0"
    amount = nanousd / NANO
    if amount >= 1:
        return f"${amount:,.2f}"
    digits = min(9, max(4, 1 - math.floor(math.log10(amount))))
    return f"${amount:.{digits}f}"


def nanousd(amount: object) -> int:
    """Parses an amount of USD (number or decimal string) to nano-USD. Raises ValueError if it is not one."""
    try:
        value = Decimal(str(amount).strip().removeprefix("$"))
    except InvalidOperation:
        raise ValueError(f"{amount!r} is not an amount of USD") from None
    if not value.is_finite() or value < 0:
        raise ValueError(f"{amount!r} is not an amount of USD of at least zero")
    return int((value * NANO).to_integral_value())


def _pico(kind: str, value: object) -> int:
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"price of {kind} is {value!r}; it must be a number of USD per million tokens") from None
    scaled = amount * 1_000_000 if amount.is_finite() else Decimal(-1)
    if scaled < 0 or scaled != scaled.to_integral_value():
        raise ValueError(
            f"price of {kind} is {value!r}; it must be at least 0 USD per million tokens, with at most six decimals"
        )
    return int(scaled)
