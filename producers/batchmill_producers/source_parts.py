"""Location and Part: where one file of a data set lies, and how its rows are read and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchmill_core.errors import SourceError

from .source_jsonl import Parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """One data file. ``name`` is what its rows carry as their source, ``shown`` what errors call it.

    ``path`` is set for a local file; ``open`` answers a stream of bytes that can seek. ``suffix`` is the last one.
    """

    name: str
    shown: str
    suffixes: tuple[str, ...]
    open: Callable[[], BinaryIO]
    path: Path | None = None

    @property
    def suffix(self) -> str:
        return self.suffixes[-1] if self.suffixes else ""

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The file for the length of a ``with`` block. Raises SourceError where it cannot be opened or read."""
        try:
            with self.open() as raw:
                yield raw
        except OSError as error:
            raise SourceError(f"{self.shown} cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a data set, or all of one that is no file. ``where`` names a row in errors by its number or line."""

    name: str | None
    read: Callable[[], Iterator[Parsed]]
    where: Callable[[int], str]
