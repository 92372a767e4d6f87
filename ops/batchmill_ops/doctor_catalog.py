"""The checks of the catalogue: each account's key and address, and the names of its models."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import requests

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings, api_key
from batchmill_core.settings_file import FILE_NAME

from .doctor_check import Check, fail, ok, refused, warn

_MODELS_S = 5.0
_MOST_SKEW_S = 60.0


def check_settings(settings: Settings) -> Check:
    """Whether there is anything to work with."""
    catalog = settings.catalog
    file = settings.home / FILE_NAME
    if not catalog.models:
        found = "has no models" if file.exists() else "is not there"
        advice = (
            "write an account and a model into it, as README shows; or, without a key, `batchmill simulate` serves one"
        )
        return warn("settings", f"{file} {found}", advice)
    return ok(
        "settings", f"{file}: {_counted(len(catalog.accounts), 'account')}, {_counted(len(catalog.models), 'model')}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_account(account: Account, settings: Settings, models: Sequence[ModelEntry] = ()) -> Iterator[Check]:
    """Whether the key is to be had, whether the provider takes it, and knows the names of these ``models``."""
    name = f"account {account.name}"
    try:
        key = api_key(account, folder=settings.home)
    except ConfigurationError as fault:
        yield refused(name, fault)
        return
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"{account.base_url}/models"
    try:
        answer = requests.get(url, headers=headers, timeout=_MODELS_S, allow_redirects=False)
    except requests.RequestException as fault:
        advice = (
            f"start the server{_here(account)}, or correct {_base_url(account, settings)}; `curl -sS {url}` shows more"
        )
        yield fail(name, f"{url} does not answer ({type(fault).__name__})", advice)
        return
    yield _judged(name, account, answer, settings, has_key=key is not None)
    yield from _check_clock(name, answer)
    if answer.status_code == requests.codes.ok:
        yield from _check_names(account, models, answer, settings)


def _here(account: Account) -> str:
    """The command for the simulated provider, where the address may be its."""
    parts = urlsplit(account.base_url)
    local = parts.hostname in ("127.0.0.1", "localhost")
    return f" (the simulated one: `batchmill simulate --port {parts.port or 80}`)" if local else ""


def _base_url(account: Account, settings: Settings) -> str:
    return f"accounts.{account.name}.base_url in {settings.home / FILE_NAME}"


def _judged(name: str, account: Account, answer: requests.Response, settings: Settings, *, has_key: bool) -> Check:
    url, status = answer.url, answer.status_code
    if status in (401, 403):
        if not has_key:
            return fail(name, f"{url} wants a key ({status})", _add_a_key(account, settings))
        return fail(name, f"{url} refuses the key ({status})", _correct_the_key(account))
    if status == requests.codes.ok:
        return ok(name, f"{url} answers{' and takes the key' if has_key else ''}")
    advice = f"correct {_base_url(account, settings)}, unless this provider lists no models"
    return warn(name, f"{url} answers {status}", advice)


def _correct_the_key(account: Account) -> str:
    if account.api_key_env is None:
        return f"correct the key in {account.api_key_file}"
    return f"correct the key in {account.api_key_env}: `export {account.api_key_env}=…`, or its line in .env"


def _add_a_key(account: Account, settings: Settings) -> str:
    variable = f"{account.name.upper().replace('-', '_')}_API_KEY"
    return (
        f'write api_key_env = "{variable}" under [accounts.{account.name}] in {settings.home / FILE_NAME}, '
        f"then `export {variable}=…`"
    )


def _check_clock(name: str, answer: requests.Response) -> Iterator[Check]:
    """A provider's dates (Retry-After, certificates) are judged by this host's clock; leases go by the database's."""
    try:
        theirs = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return
    ahead_s = time.time() - theirs
    if abs(ahead_s) > _MOST_SKEW_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        detail = f"this host's clock is {abs(ahead_s):,.0f} s {side} the provider's"
        yield warn(name, detail, "`sudo timedatectl set-ntp true`")


def _check_names(
    account: Account, models: Sequence[ModelEntry], answer: requests.Response, settings: Settings
) -> Iterator[Check]:
    listed = _listed(answer)
    for model in models:
        if listed and model.upstream not in listed:
            near = get_close_matches(model.upstream, listed, n=1, cutoff=0.6)
            advice = f"correct the name in {settings.home / FILE_NAME}" + (
                f"; did you mean {near[0]!r}?" if near else ""
            )
            yield warn(f"model {model.name}", f"account {account.name} does not list {model.upstream!r}", advice)


def _listed(answer: requests.Response) -> list[str]:
    """The ids of an OpenAI-compatible list of models; none where the answer is something else."""
    try:
        found: Any = answer.json()
        return [str(model["id"]) for model in found["data"]]
    except (ValueError, KeyError, TypeError):
        return []
