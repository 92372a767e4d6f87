"""Chooses the reader of a file by its suffix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from batchmill_core.errors import SourceError

from .source_bytes import COMPRESSED_SUFFIXES, check_readable, open_file, open_stdin
from .source_csv import read_csv
from .source_json import read_json
from .source_jsonl import Parsed, read_jsonl

FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
Reader = Callable[[], Iterator[Parsed]]
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def file_reader(dataset: str | Path, *, encoding: str) -> tuple[str, str, Reader]:
    """Name, how errors call a line, and what reads a file, or standard input for ``-``. Raises SourceError."""
    if str(dataset) == "-":
        return "stdin", "stdin line", lambda: read_jsonl(open_stdin(encoding=encoding))
    path = Path(dataset).expanduser()
    check_readable(path)
    suffix = _format_suffix(path)

    def read() -> Iterator[Parsed]:
        blocks = open_file(path, encoding=encoding)
        if suffix in _DELIMITERS:
            return read_csv(blocks, name=str(path), delimiter=_DELIMITERS[suffix])
        return read_json(blocks, name=str(path)) if suffix == ".json" else read_jsonl(blocks)

    return path.name, f"{path} line", read


def _format_suffix(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise SourceError(
            f"{path} has no known suffix; known ones: {', '.join(FORMATS)}, each also with .gz or .zst "
            "(JSON Lines can also come on standard input: -)"
        )
    return suffixes[-1]
