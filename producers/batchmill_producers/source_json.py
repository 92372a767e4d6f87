"""Reads a .json file: an array of objects, streamed, or JSON Lines under that name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from batchmill_core.errors import SourceError

from .source_jsonl import BadLine, Parsed, as_row, careful_decoder, nesting_or, read_jsonl

_BLANK = " \t\r\n"


def read_json(blocks: Iterable[bytes], *, name: str) -> Iterator[Parsed]:
    """Yields the objects of a top-level array with the line each starts on, or reads lines where there is no array.

    Broken syntax inside an array raises SourceError, since nothing tells where the next element would start.
    """
    blocks = iter(blocks)
    head = b""
    for block in blocks:
        head += block
        if head.strip():
            break
    rest = chain([head], blocks)
    return _elements(_Text(rest, name=name)) if head.lstrip().startswith(b"[") else _lines(read_jsonl(rest))


def _lines(rows: Iterator[Parsed]) -> Iterator[Parsed]:
    """Lines, the first of which tells what is expected when it is none: it may be one object over many lines."""
    for number, value, mended in islice(rows, 1):
        if isinstance(value, BadLine):
            reason = f"{value.reason} (a .json file holds one array of objects, or one object per line)"
            yield number, BadLine(reason), mended
        else:
            yield number, value, mended
    yield from rows


def _elements(text: _Text) -> Iterator[Parsed]:
    text.take("[")
    more = text.peek() != "]"
    while more:
        text.peek()
        line = text.line
        yield (line, *as_row(text.value()))
        more = text.peek() == ","
        if more:
            text.take(",")
            if text.peek() == "]":
                raise text.fault("there is a comma before the end of the array; take it out")
    text.take("]")
    text.end()


class _Text:
    """A position in text of which only the part not yet consumed is held."""

    def __init__(self, blocks: Iterable[bytes], *, name: str) -> None:
        self._blocks = iter(blocks)
        self._name = name
        self._undecoded = b""
        self._text = ""
        self._at = 0
        self.line = 1

    def peek(self) -> str:
        """The next character that is not blank, without taking it."""
        while True:
            while self._at < len(self._text):
                char = self._text[self._at]
                if char not in _BLANK:
                    return char
                self._advance(self._at + 1)
            if not self._read_more(1):
                return ""

    def take(self, expected: str) -> None:
        found = self.peek()
        if found != expected:
            what = f"found {found!r}" if found else "the file ends"
            raise self.fault(f"{expected!r} expected, but {what}")
        self._advance(self._at + 1)

    def fault(self, what: str) -> SourceError:
        """An error that names the file and the line."""
        return SourceError(f"{self._name} line {self.line}: not valid JSON: {what}")

    def end(self) -> None:
        """Raises SourceError when something follows: its rows would be left out without a word."""
        if found := self.peek():
            raise SourceError(
                f"{self._name} line {self.line}: {found!r} follows after the end of the array; a .json file holds one array "
                "of objects, or one object per line"
            )

    def value(self) -> Any:
        """The next JSON value. One that is not whole yet is tried again when the text held has doubled."""
        while True:
            try:
                value, end = careful_decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text.rstrip())
                if not self._read_more(max(1, len(self._text) - self._at)):
                    raise self._broken("the file ends within it; is it cut short?" if cut else error.msg) from error
                continue
            except (ValueError, RecursionError) as error:
                raise self._broken(nesting_or(error)) from error
            if end < len(self._text) or not self._read_more(1):
                self._advance(end)
                return value

    def _broken(self, reason: str) -> SourceError:
        return SourceError(
            f"{self._name}: the array element that starts on line {self.line} is not valid JSON: {reason}"
        )

    def _advance(self, to: int) -> None:
        self.line += self._text.count("\n", self._at, to)
        self._at = to

    def _read_more(self, chars: int) -> bool:
        """Adds at least so many characters unless the file ends; False when it added none."""
        self._text, self._at = self._text[self._at :], 0
        before = len(self._text)
        parts = [self._text]
        for block in self._blocks:
            parts.append(self._decode(block))
            chars -= len(parts[-1])
            if chars <= 0:
                break
        self._text = "".join(parts)
        return len(self._text) > before

    def _decode(self, block: bytes) -> str:
        data = self._undecoded + block
        try:
            self._undecoded = b""
            return data.decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise SourceError(
                    f"{self._name}: byte 0x{data[error.start]:02x} after line {self.line} is not UTF-8; "
                    "name the encoding, for example --encoding latin-1"
                ) from error
            self._undecoded = data[error.start :]
            return data[: error.start].decode()
