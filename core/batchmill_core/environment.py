"""Reads environment variables and the ``.env`` file of a folder; the environment wins."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dotenv.parser import parse_stream

from .errors import ConfigurationError

DOTENV = ".env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One variable with the place it was set in, as a message names it."""

    value: str
    place: str


def read_variables(folder: Path, env: Mapping[str, str]) -> dict[str, Variable]:
    """All variables of ``env`` and of ``folder/.env``. Raises ConfigurationError when .env cannot be read.

    Variables in .env are taken as they stand: ``$NAME`` is not replaced, so a key may hold a dollar sign.
    """
    path = folder / DOTENV
    found = {k: Variable(value=v, place=f"{k} in {path}") for k, v in _read_dotenv(path).items()}
    return found | {k: Variable(value=v, place=k) for k, v in env.items()}


def _read_dotenv(path: Path) -> dict[str, str]:
    text = read_text(path) if path.is_file() else ""
    variables: dict[str, str] = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.error:  # the line is not shown: it may hold a key
            raise ConfigurationError(
                f"{path}:{binding.original.line}: this line is not NAME=value; correct or remove it"
            )
        if binding.key is not None and binding.value is not None:
            variables[binding.key] = binding.value
    return variables


def read_text(path: Path) -> str:
    """The text of a configuration file in UTF-8, with or without a byte order mark. Raises ConfigurationError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
