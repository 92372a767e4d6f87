"""Reads batchmill.toml: its plain settings and its catalogue of accounts and models."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import Field

from .catalog import Account, Catalog, Limits, ModelEntry, nearest
from .engine import ENTRY_POINT_GROUP
from .environment import read_text
from .errors import ConfigurationError
from .settings_check import Count, Rate, ScalarTable, Seconds, Table, check, dotted, unknown_key
from .usage import TOKEN_KINDS, Price, nanousd

FILE_NAME = "batchmill.toml"
ENGINES = ("openvino", "vllm", "transformers", "server")

# Names become parts of queue names, which Celery splits at commas and users type in a shell.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
# Upper case only, so that a key written here by mistake is told from a name and never shown.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_LIMITS = ("requests_per_minute", "requests_per_second", "burst", "tokens_per_minute")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """What batchmill.toml says: plain settings by name (only those that stand there), and the catalogue."""

    scalars: Mapping[str, Any] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog)


class _LimitsTable(Table):
    requests_per_minute: Rate | None = None
    requests_per_second: Rate | None = None
    burst: Count | None = None
    tokens_per_minute: Rate | None = None


class _AccountTable(_LimitsTable):
    base_url: str
    api_key_env: str | None = None
    api_key_file: str | None = None
    max_in_flight: Count = 256
    timeout_s: Seconds = 120.0
    max_retries: int = Field(default=5, ge=0)


class _ModelTable(_LimitsTable):
    account: str | None = None
    model: str | None = Field(default=None, min_length=1)
    engine: str | None = None
    source: str | None = Field(default=None, min_length=1)
    price: dict[str, Any] | None = None
    device_usd_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    context_tokens: Count | None = None
    timeout_s: Seconds | None = None
    max_retries: int | None = Field(default=None, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)


def read_settings_file(path: Path) -> FileSettings:
    """The settings and catalogue in ``path``. Raises ConfigurationError naming the file and line or key."""
    data = _parse(path)
    accounts, models = _tables(data, "accounts", path), _tables(data, "models", path)
    for key in data.keys() - ScalarTable.model_fields.keys():
        raise unknown_key(key, [*ScalarTable.model_fields, "accounts", "models"], f"{path}: {dotted(key)}")
    scalars = check(ScalarTable, data, where=lambda key: f"{path}: {key}", folder=path.parent, strict=True)
    catalog_accounts = {name: _account(name, table, path) for name, table in accounts.items()}
    catalog_models = {name: _model(name, table, path, catalog_accounts) for name, table in models.items()}
    return FileSettings(
        scalars=scalars.model_dump(exclude_unset=True),
        catalog=Catalog(accounts=catalog_accounts, models=catalog_models),
    )


def _parse(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}:{_line(str(error), text)}: this is not valid TOML: {error}") from None


def _line(message: str, text: str) -> int:
    """The line that tomllib's message names; ``(at end of document)`` is the last one."""
    found = re.search(r"\(at line (\d+), column \d+\)$", message)
    return int(found[1]) if found else len(text.splitlines())


def _tables(data: dict[str, Any], key: str, path: Path) -> dict[str, dict[str, Any]]:
    tables = data.pop(key, {})
    if not isinstance(tables, dict):
        raise ConfigurationError(f"{path}: {key} must be tables; write [{key}.NAME] above the keys of one of them")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: {dotted(key, name)} must be a table; write [{key}.NAME] above its keys")
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{path}: {dotted(key, name)} cannot be a name; use up to 128 letters, digits and . _ : / @ + -"
            )
    return tables


def _account(name: str, table: Mapping[str, Any], path: Path) -> Account:
    place = f"{path}: {dotted('accounts', name)}"
    parsed = check(_AccountTable, table, where=lambda key: f"{place}.{key}", folder=path.parent, strict=True)
    if parsed.api_key_env is not None and parsed.api_key_file is not None:
        raise ConfigurationError(f"{place} has both api_key_env and api_key_file; keep one of them")
    if parsed.api_key_env is not None and not _VARIABLE.fullmatch(parsed.api_key_env):
        raise ConfigurationError(
            f"{place}.api_key_env must be the name of an environment variable in capitals, such as "
            "OPENAI_API_KEY, not the key itself"
        )
    return Account(
        name=name,
        base_url=parsed.base_url,
        api_key_env=parsed.api_key_env,
        api_key_file=parsed.api_key_file,
        limits=_limits(parsed, place),
        max_in_flight=parsed.max_in_flight,
        timeout_s=parsed.timeout_s,
        max_retries=parsed.max_retries,
    )


def _model(name: str, table: Mapping[str, Any], path: Path, accounts: Mapping[str, Account]) -> ModelEntry:
    place = f"{path}: {dotted('models', name)}"
    parsed = check(_ModelTable, table, where=lambda key: f"{place}.{key}", folder=path.parent, strict=True)
    _check_served(parsed, place, accounts)
    return ModelEntry(
        name=name,
        account=parsed.account,
        model=parsed.model,
        engine=parsed.engine,
        source=_source(parsed.source, path.parent),
        price=_price(parsed.price, place),
        device_nanousd_per_hour=None if parsed.device_usd_per_hour is None else nanousd(parsed.device_usd_per_hour),
        limits=_limits(parsed, place),
        context_tokens=parsed.context_tokens,
        timeout_s=parsed.timeout_s,
        max_retries=parsed.max_retries,
        options=_with_whole_paths(parsed, path.parent),
    )


def _check_served(model: _ModelTable, place: str, accounts: Mapping[str, Account]) -> None:
    """A model is served by an account or by an engine, and has only the keys that mean something there."""
    if (model.account is None) == (model.engine is None):
        has = "neither account nor engine" if model.account is None else "both account and engine"
        raise ConfigurationError(f"{place} has {has}; give account for a provider's API, or engine to run it here")
    if model.account is not None:
        _check_api_model(model, model.account, place, accounts)
    elif model.engine is not None:
        _check_local_model(model, model.engine, place)


def _check_api_model(model: _ModelTable, account: str, place: str, accounts: Mapping[str, Account]) -> None:
    if account not in accounts:
        raise ConfigurationError(
            f"{place}.account is {account!r}, which is not configured{nearest(account, accounts)} "
            f"Add it under [{dotted('accounts', account)}]"
        )
    for key in ("source", "device_usd_per_hour"):
        if getattr(model, key) is not None:
            raise ConfigurationError(f"{place}.{key} is for a model with an engine, but this one has an account")


def _check_local_model(model: _ModelTable, engine: str, place: str) -> None:
    if engine not in ENGINES and engine not in (installed := entry_points(group=ENTRY_POINT_GROUP).names):
        raise ConfigurationError(
            f"{place}.engine is {engine!r}, which is no engine{nearest(engine, {*ENGINES, *installed})}"
        )
    if engine == "server" and "command" not in model.options:
        raise ConfigurationError(
            f"{place}.options.command is missing; give what starts the server, such as "
            '"vllm serve {model} --host {host} --port {port}"'
        )
    if engine in ENGINES and engine != "server" and model.source is None:  # others say by themselves what they need
        raise ConfigurationError(f"{place}.source is missing; give package:PACKAGE/FILE, a path, or hf:ORG/NAME")
    if model.price is not None and model.device_usd_per_hour is not None:
        raise ConfigurationError(f"{place} has both price and device_usd_per_hour; a call can have only one cost")
    limit = next((key for key in _LIMITS if getattr(model, key) is not None), None)
    if limit is not None:
        raise ConfigurationError(f"{place}.{limit} limits calls to a provider, but this model runs here; remove it")


def _limits(table: _LimitsTable, place: str) -> Limits:
    if table.requests_per_minute is not None and table.requests_per_second is not None:
        raise ConfigurationError(f"{place} has both requests_per_minute and requests_per_second; keep one of them")
    if table.burst is not None and table.requests_per_minute is None and table.requests_per_second is None:
        raise ConfigurationError(f"{place}.burst needs requests_per_minute or requests_per_second beside it")
    return Limits(**{key: getattr(table, key) for key in _LIMITS})


def _price(prices: Mapping[str, Any] | None, place: str) -> Price | None:
    if prices is None:
        return None
    for kind in prices.keys() - set(TOKEN_KINDS):
        raise unknown_key(kind, list(TOKEN_KINDS), f"{place}.{dotted('price', kind)}")
    try:
        return Price.from_usd_per_mtok(prices)
    except ValueError as error:
        raise ConfigurationError(f"{place}.price is wrong: {error}") from None


def _source(source: str | None, folder: Path) -> str | None:
    """A relative path is taken from the file's folder, so that a worker started elsewhere finds it."""
    if source is None or source.startswith(("package:", "hf:")):
        return source
    try:
        return str(folder / Path(source).expanduser())
    except RuntimeError:  # nobody's home: told when this model is used, and no reason to stop all else
        return source


def _with_whole_paths(model: _ModelTable, folder: Path) -> dict[str, Any]:
    """The options; paths among them are taken from the file's folder, too. vLLM's template may be one without a brace."""
    options = dict(model.options)
    if isinstance(adapters := options.get("lora"), Mapping):
        options["lora"] = {k: _source(v, folder) if isinstance(v, str) and v else v for k, v in adapters.items()}
    if isinstance(log_file := options.get("log_file"), str) and log_file:
        options["log_file"] = _source(log_file, folder)
    template = options.get("chat_template")
    if model.engine == "vllm" and isinstance(template, str) and template and "{" not in template:
        options["chat_template"] = _source(template, folder)
    return options
