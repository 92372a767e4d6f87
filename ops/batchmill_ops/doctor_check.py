"""What `batchmill doctor` says of one thing that it looked at: how it is, where, and what to type."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum

from batchmill_core.environment import DOTENV, read_variables
from batchmill_core.settings import PREFIX, Settings
from batchmill_core.settings_file import FILE_NAME

_COMMAND_LAST = re.compile(r"[;:] (pip install [^;]*)$")
BROKEN, STANDS = 2, 3  # exit codes: something has to be set right; all of it works, but a job cannot go on


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. ``advice`` says what to do when it is not ok, ``exit_code`` what it ends with."""

    name: str
    level: Level
    detail: str
    advice: str | None = None
    exit_code: int = 0

    def as_dict(self) -> dict[str, str | None]:
        return {"name": self.name, "level": self.level.value, "detail": self.detail, "advice": self.advice}


def ok(name: str, detail: str) -> Check:
    return Check(name=name, level=Level.OK, detail=detail)


def warn(name: str, detail: str, advice: str) -> Check:
    """Works, but not for long or not as well as it could."""
    return Check(name=name, level=Level.WARN, detail=detail, advice=advice)


def fail(name: str, detail: str, advice: str | None = None) -> Check:
    """Broken until somebody sets it right."""
    return Check(name=name, level=Level.FAIL, detail=detail, advice=advice, exit_code=BROKEN)


def stands(name: str, detail: str, advice: str) -> Check:
    """A job that somebody wants cannot go on."""
    return Check(name=name, level=Level.FAIL, detail=detail, advice=advice, exit_code=STANDS)


def refused(name: str, fault: Exception) -> Check:
    """A failure whose sentence says after a semicolon what to do, or ends with the command to type."""
    command = _COMMAND_LAST.search(str(fault))
    if command is not None:
        return fail(name, str(fault)[: command.start()], f"`{command[1]}`")
    detail, _, advice = str(fault).partition("; ")
    return fail(name, detail, advice or None)


def place_of(key: str, settings: Settings) -> str:
    """Where a setting was found, in the words of error messages."""
    variable = read_variables(settings.home, os.environ).get(PREFIX + key.upper())
    return variable.place if variable is not None else f"{key} in {settings.home / FILE_NAME}"


def how_to_set(key: str, value: str, settings: Settings) -> str:
    """What to type or write so that a setting becomes ``value``, in the place where it was set."""
    name, place = PREFIX + key.upper(), place_of(key, settings)
    if place == name:
        return f"`export {name}='{value}'`"
    if place.endswith(DOTENV):
        return f"write {name}={value} in {settings.home / DOTENV}"
    return f'write {key} = "{value}" in {settings.home / FILE_NAME}'


def how_to_unset(key: str, settings: Settings) -> str:
    """What to type or remove so that a setting is not given any more."""
    name, place = PREFIX + key.upper(), place_of(key, settings)
    return f"`unset {name}`" if place == name else f"remove {place.replace(' in ', ' from ', 1)}"
