"""How `batchmill doctor` lays a check out: in columns on a terminal, one line each elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from batchmill_ops.doctor import Check

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_INDENT = 5
_ARROW = "→ "
_UNBROKEN = re.compile(r"`[^`]*`\S*|\S+")  # a command is never broken, so that it can be copied


def check_lines(check: Check, width: int | None) -> Iterator[Text]:
    """The lines of one check, of at most ``width`` characters but for commands that are longer; None: however long."""
    level, name = check.level.value, check.name
    body = list(_wrapped(f"{name}: {check.detail}", width, _INDENT))
    first = Text.assemble((f"{level:<{_INDENT}}", _STYLES[level]), body[0])
    first.stylize("bold", _INDENT, _INDENT + len(name))
    yield first
    yield from (Text(" " * _INDENT + line) for line in body[1:])
    if check.advice is None:
        return
    for number, line in enumerate(_wrapped(check.advice, width, _INDENT + len(_ARROW))):
        yield Text.assemble(" " * _INDENT, _ARROW if number == 0 else " " * len(_ARROW), _with_commands(line))


def _wrapped(text: str, width: int | None, indent: int) -> Iterator[str]:
    if width is None:
        yield text
        return
    yield from _filled(_UNBROKEN.findall(text), max(20, width - indent))


def _filled(words: Iterable[str], width: int) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _with_commands(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(r"`[^`]*`", "cyan")
    return text
