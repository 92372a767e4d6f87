"""Accounts and models as the user configured them, with prices."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigurationError
from .usage import Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of calls to one account or model; None means no limit.

    ``requests_per_minute`` and ``requests_per_second`` are alternatives; ``burst`` is how many requests may go at once
    when the line was quiet (default: one second's worth, at least 1).
    """

    requests_per_minute: float | None = None
    requests_per_second: float | None = None
    burst: int | None = None
    tokens_per_minute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A provider's address, key and limits. The key itself is never kept here; see ``settings.api_key``."""

    name: str
    base_url: str
    api_key_env: str | None = None
    api_key_file: str | None = None
    limits: Limits = field(default_factory=Limits)
    max_in_flight: int = 256
    timeout_s: float = 120.0
    max_retries: int = 5

    @property
    def queue(self) -> str:
        return f"api.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One entry under ``[models]``: served by an account (API wing) or by an engine here (GPU wing), never both."""

    name: str
    account: str | None = None
    model: str | None = None
    engine: str | None = None
    source: str | None = None
    price: Price | None = None
    device_nanousd_per_hour: int | None = None
    limits: Limits = field(default_factory=Limits)
    context_tokens: int | None = None
    timeout_s: float | None = None
    max_retries: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def upstream(self) -> str:
        """The provider's name for the model."""
        return self.model or self.name

    @property
    def queue(self) -> str:
        return f"api.{self.account}" if self.account is not None else f"gpu.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All accounts and models of one configuration."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    models: Mapping[str, ModelEntry] = field(default_factory=dict)

    def model(self, name: str) -> ModelEntry:
        """The entry called ``name``. Raises ConfigurationError naming the nearest ones."""
        if name not in self.models:
            raise ConfigurationError(
                f"model {name!r} is not in the catalogue{nearest(name, self.models)} "
                f'Add it to batchmill.toml under [models."{name}"].'
            )
        return self.models[name]

    def account(self, name: str) -> Account:
        """The account called ``name``. Raises ConfigurationError naming the nearest ones."""
        if name not in self.accounts:
            raise ConfigurationError(
                f"account {name!r} is not configured{nearest(name, self.accounts)} "
                f"Add it to batchmill.toml under [accounts.{name}]."
            )
        return self.accounts[name]


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` where a known word is close, else a list of the known words, else a full stop."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(words)}." if words else "."
