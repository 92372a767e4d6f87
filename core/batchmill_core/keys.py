"""Reads a provider's key where the account says it is, afresh at each call, and refuses what cannot be one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .catalog import Account
from .environment import DOTENV, read_text, read_variables
from .errors import ConfigurationError

_PLACEHOLDER = re.compile(
    r"""
    (your|my|insert|replace|enter|put|paste|add)[-_ ].*   # YOUR_OPENAI_API_KEY, your-key-here
    | <.*> | \[.*\] | \$\{?\w+\}? | \{.*\}                # <your key>, ${OPENAI_API_KEY}
    | (sk-|gsk_|hf_)?(\.{2,}|…|x{3,}|\*{3,}) | .*(\.{3}|…)  # sk-..., sk-xxx, sk-ab...
    | (sk-)?(change[-_ ]?me|todo|placeholder|example|secret|key|api[-_ ]?key|token|key[-_ ]?here)
    | [A-Z][A-Z0-9]*(_[A-Z0-9]+)*_(API_)?KEY              # the variable's own name
    """,
    re.VERBOSE | re.IGNORECASE,
)


def api_key(account: Account, env: Mapping[str, str] | None = None, folder: Path | None = None) -> str | None:
    """The key of ``account``, or None for a server that wants none; read again at each call, never kept.

    ``env`` defaults to the process environment, ``folder`` (of .env and of relative key files) to the current one.
    Raises ConfigurationError, which never holds the key, when it is missing, empty, a placeholder or no possible key.
    """
    folder = folder or Path.cwd()
    if account.api_key_env is not None:
        found = read_variables(folder, os.environ if env is None else env).get(account.api_key_env)
        place, text = account.api_key_env, found.value if found else ""
    elif account.api_key_file is not None:
        path = folder / Path(account.api_key_file).expanduser()
        place, text = str(path), _read_key_file(path, account)
    else:
        return None
    return _checked(text.strip(), place, account)


def _read_key_file(path: Path, account: Account) -> str:
    if not path.is_file():
        raise ConfigurationError(
            f"the key file {path} of account {account.name!r} does not exist; {_how_to_set(account)}"
        )
    return read_text(path)


def _checked(key: str, place: str, account: Account) -> str:
    if not key:
        raise ConfigurationError(
            f"account {account.name!r} needs a key, but {place} is not set; {_how_to_set(account)}"
        )
    if _PLACEHOLDER.fullmatch(key):
        raise ConfigurationError(
            f"{place} of account {account.name!r} holds a placeholder, not a key; {_how_to_set(account)}"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError(
            f"{place} of account {account.name!r} holds a space, line break or character that no key has; "
            "set it to the key alone, without 'Bearer'"
        )
    return key


def _how_to_set(account: Account) -> str:
    if account.api_key_env is not None:
        return f"run `export {account.api_key_env}=…` or add the line {account.api_key_env}=… to {DOTENV}"
    return "write the key into it, alone on one line"
