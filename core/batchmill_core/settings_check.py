"""Checks configured values and says in one sentence which one is wrong, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from .catalog import nearest
from .errors import ConfigurationError
from .urls import CHECKS, redacted_url

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Percent = Annotated[float, Field(gt=0, le=100)]
LEAST_SECRET_CHARS = 8


def _secret(value: str) -> str:
    """What travels in an HTTP header as it stands. The message holds nothing of it."""
    if len(value) < LEAST_SECRET_CHARS or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"it must be {LEAST_SECRET_CHARS} or more ASCII characters without spaces")
    return value


Secret = Annotated[str, AfterValidator(_secret)]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_MAX_SHOWN_CHARS = 60


class Table(BaseModel):
    """A group of keys of which unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ScalarTable(Table):
    """The settings that are one value each; see Settings for what they mean."""

    broker_url: str | None = None
    database_url: str | None = None
    cache_url: str | None = None
    lease_s: Seconds | None = None
    beat_s: Seconds | None = None
    reap_every_s: Seconds | None = None
    publish_every_s: Seconds | None = None
    drain_s: Seconds | None = None
    slots: Count | None = None
    gpu_slots: Count | None = None
    worker_max_chunks: Count | None = None
    worker_max_memory_mb: Count | None = None
    sample_every_s: Seconds | None = None
    sample_keep_days: Rate | None = None
    sample_max_rows: Count | None = None
    gpu_use_percent: Percent | None = None
    gpu_starved_percent: Percent | None = None
    gpu_memory_low_percent: Percent | None = None
    gpu_memory_high_percent: Percent | None = None
    gpu_p99_ms: Rate | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    flower_password: Secret | None = None
    metrics_token: Secret | None = None


SECRETS = frozenset({"flower_password", "metrics_token"})

T = TypeVar("T", bound=Table)
Where = Callable[[str], str]


def check(table: type[T], values: Mapping[str, Any], *, where: Where, folder: Path, strict: bool) -> T:
    """``values`` as a ``table``, its URLs checked and made whole. Raises ConfigurationError about the first wrong key.

    ``where`` gives the words for a key's place (``batchmill.toml: slots``); ``strict`` is off for text values such as
    environment variables.
    """
    try:
        parsed = table.model_validate(dict(values), strict=strict)
    except ValidationError as error:
        raise ConfigurationError(_sentence(error.errors(include_url=False)[0], table, where)) from None
    return parsed.model_copy(update=_checked_urls(parsed, where, folder))


def dotted(*keys: str) -> str:
    """A key path as TOML writes it: ``models."gpt-4.1".price``."""
    return ".".join(key if _BARE_KEY.fullmatch(key) else f'"{key}"' for key in keys)


def unknown_key(key: str, known: Mapping[str, Any] | list[str], place: str) -> ConfigurationError:
    """An error for a key that nobody knows, naming the nearest one. Its value is not shown: it may be a secret."""
    hint = nearest(key, known)
    if key in ScalarTable.model_fields:
        hint = "; it belongs to the top of the file, above the first [table]."
    return ConfigurationError(f"{place} is not a known setting{hint}")


def _checked_urls(parsed: Table, where: Where, folder: Path) -> dict[str, str]:
    checked = {}
    for name, check_url in CHECKS.items():
        url = getattr(parsed, name, None)
        if url is not None:
            try:
                checked[name] = check_url(url, folder)
            except ValueError as error:
                raise ConfigurationError(f"{where(name)} is {redacted_url(url)!r}: {error}") from None
    return checked


def _sentence(error: ErrorDetails, table: type[Table], where: Where) -> str:
    keys = [str(part) for part in error["loc"]]
    place = where(dotted(*keys))
    if error["type"] == "extra_forbidden":
        return str(unknown_key(keys[-1], dict(table.model_fields), place))
    if error["type"] == "missing":
        return f"{place} is missing; add it"
    rule = error["msg"].replace("Input should be", "it must be").replace("String should", "it must")
    rule = rule.replace("a valid dictionary", "a table").removeprefix("Value error, ")
    hint = nearest(str(error["input"]), ("debug", "info", "warning", "error")) if keys[-1] == "log_level" else ""
    return f"{place} is {_shown(keys[-1], error['input'])}; {rule}{hint}"


def _shown(key: str, value: object) -> str:
    if key.startswith("api_key") or key in SECRETS:
        return "not shown"
    if isinstance(value, Mapping | list):
        return "a table" if isinstance(value, Mapping) else "a list"
    text = repr(redacted_url(value) if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"
