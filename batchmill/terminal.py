"""Where words go: facts to standard output, talk to standard error."""

from __future__ import annotations

import sys
from typing import Any

import orjson
from rich.console import Console, RenderableType

_WIDE = 200  # for tables that no terminal shows, so that no column is cut


def facts() -> Console:
    """Standard output, for people."""
    return _console(sys.stdout, stderr=False)


def talk() -> Console:
    """Standard error, for people."""
    return _console(sys.stderr, stderr=True)


def _console(stream: Any, *, stderr: bool) -> Console:
    width = None if stream.isatty() else _WIDE
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """One line of talk, never wrapped, so that commands in it can be copied."""
    talk().print(text, soft_wrap=True)


def tell(what: str | RenderableType, *, aside: bool = False) -> None:
    """Something that was asked for, for people; ``aside`` when standard output is taken by results.

    Where no terminal shows it, lines end without padding.
    """
    console = talk() if aside else facts()
    if console.is_terminal:
        console.print(what, soft_wrap=isinstance(what, str))
        return
    with console.capture() as held:
        console.print(what, soft_wrap=isinstance(what, str))
    console.file.write("".join(f"{line.rstrip()}\n" for line in held.get().splitlines()))


def print_json(value: Any) -> None:
    """Something that was asked for, for programs."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")
