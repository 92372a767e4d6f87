"""How the ``options`` of a catalogue entry are declared, checked and read into an engine's dataclass.

A field says beside its type what its value must be: ``capacity_rows: Annotated[int, whole(1)] = 64``.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, get_type_hints

import orjson

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

CHECK_MEMORY = "check_memory"  # asked before the engine is made, see ``fit``
T = TypeVar("T")
_MOST_WHOLE = 2**63 - 1
_MOST_NUMBER = 1e12
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a value must be.

    ``lacks`` answers with the words after "it must be", or None for a value that fits; ``read`` makes of such a value
    what the field holds. A text of a ``private`` option may hold a key, so that no message shows it. ``missing`` says
    what to give for an option that has no default.
    """

    lacks: Callable[[Any], str | None]
    read: Callable[[Any], Any] = lambda value: value
    private: bool = False
    missing: str = ""

    def refusal(self, name: str, value: Any) -> str | None:
        """One sentence on a value that does not fit, else None."""
        must = self.lacks(value)
        if must is None:
            return None
        shown = _kind(value) if self.private else short(value)
        return f"{name} is {shown}; it must be {must}"


def parse_options(
    kind: type[T],
    options: Mapping[str, Any],
    *,
    engine: str,
    model: str,
    beside: Sequence[str] = (),
    elsewhere: str = "",
) -> T:
    """The options of one entry as ``kind``, a dataclass whose every field is annotated with its Rule.

    Raises ConfigurationError naming the option that is unknown, missing or has a wrong value. ``beside`` are
    options of the entry that its engine never sees, ``elsewhere`` says where others belong.
    """
    where = f"[models.{model}] options"
    rules = rules_of(kind)
    for name, value in options.items():
        if name not in rules:
            unknown = f"{where}: {name!r} is not an option of {engine}{nearest(name, [*rules, *beside])}"
            raise ConfigurationError(f"{unknown} {elsewhere}".strip())
        refusal = rules[name].refusal(name, value)
        if refusal is not None:
            raise ConfigurationError(f"{where}: {refusal}")
    for name in _needed(kind):
        if name not in options:
            raise ConfigurationError(f"{where}: {name} is missing; {rules[name].missing}")
    return kind(**{name: rules[name].read(value) for name, value in options.items()})


def rules_of(kind: type[Any]) -> dict[str, Rule]:
    """The rule of each field of an options dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: next(r for r in hints[one.name].__metadata__ if isinstance(r, Rule)) for one in fields(kind)}


def _needed(kind: type[Any]) -> list[str]:
    return [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]


def short(value: Any) -> str:
    """A value as a message shows it, whatever its size and depth."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python 3.11 writes no whole number of more than 4300 digits
        return "a number of thousands of digits"


def _kind(value: Any) -> str:
    words: dict[type, str] = {str: "a text", list: "a list", tuple: "a list", dict: "a table"}
    return words.get(type(value), short(value)) if value else short(value)


# the rules


def whole(least: int, most: int = _MOST_WHOLE) -> Rule:
    def lacks(value: Any) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool)
        if fits and least <= value <= most:
            return None
        above = fits and value > most
        return f"a whole number {f'from {least} to {most}' if above or most != _MOST_WHOLE else f'of at least {least}'}"

    return Rule(lacks=lacks)


def number(least: float, most: float = _MOST_NUMBER, *, above: bool = False, unit: str = "") -> Rule:
    """From ``least``, or ``above`` it, to ``most``."""
    of = f"a number of {unit}" if unit else "a number"
    begin = f"{of} {'above' if above else 'of at least'} {least:g}"
    words = begin if most == _MOST_NUMBER else f"{begin} and at most {most:.15g}"

    def lacks(value: Any) -> str | None:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if fits and least <= value <= most and not (above and value == least):
            return None
        return f"{begin} and at most {most:.15g}" if fits and value > most else words

    return Rule(lacks=lacks, read=float)


def one_of(*choices: str) -> Rule:
    def lacks(value: Any) -> str | None:
        return None if isinstance(value, str) and value in choices else f"one of {', '.join(choices)}"

    return Rule(lacks=lacks)


def is_text(value: Any) -> bool:
    """Whether it is a text that a program can be handed: not empty and without NUL."""
    return isinstance(value, str) and value != "" and "\0" not in value


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite one; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_NUMBER


def every(fits: Callable[[Any], bool], words: str) -> Rule:
    """A rule that is one question."""
    return Rule(lacks=lambda value: None if fits(value) else words)


TEXT = every(is_text, "a text, and not an empty one")
FLAG = every(is_flag, "true or false")


def table_of(
    fits: Callable[[Any], bool], words: str, *, names: Callable[[str], bool] = bool, private: bool = False
) -> Rule:
    """A table whose every name and value fits; the first that does not is told."""

    def lacks(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return words
        for name, one in value.items():
            if not names(name):
                return f"{words}; {short(name)} cannot be a name"
            if not fits(one):
                return f"{words}; {short(name)} is {_kind(one) if private else short(one)}"
        return None

    return Rule(lacks=lacks, private=private)


def is_plain(value: Any) -> bool:
    """Whether JSON can hold it: texts, finite numbers, true, false, lists and tables."""
    try:
        json.dumps(value, allow_nan=False)  # refuses dates and NaN, which orjson writes as texts and null
        orjson.dumps(value)  # refuses what is too large or too deep for a message to the engine's process
    except (TypeError, ValueError, RecursionError):
        return False
    return True
