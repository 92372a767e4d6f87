"""Opens a data set of one or many files: finds them, and chooses the reader of each by its suffix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from batchmill_core.errors import SourceError

from .extras import needed_for
from .source_bytes import COMPRESSED_SUFFIXES, open_file, open_stdin
from .source_csv import read_csv
from .source_json import read_json
from .source_jsonl import Parsed, read_jsonl
from .source_local import fixed_part, locate
from .source_parts import Location, Part
from .source_urls import is_url, locate_url, public_url

_KINDS = {
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "TSV",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".arrows": "Arrow",
    ".feather": "Arrow",
}
FORMATS = tuple(_KINDS)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_OTHER_PACKINGS = (".bz2", ".xz", ".lz4", ".br", ".zip", ".7z", ".tar", ".tgz", ".snappy")
_SHOWN_KINDS = 4


def file_parts(dataset: str | Path, *, encoding: str) -> tuple[str, list[Part]]:
    """The name of a data set and its parts: a file, a folder, a pattern, a URL, or standard input for ``-``.

    Raises SourceError when there is no such file, a suffix is not known, or the files are of several formats.
    """
    if str(dataset) == "-":
        read = partial(_read_stdin, encoding)
        return "stdin", [Part(name="stdin", read=read, where=lambda line: f"stdin line {line}")]
    if not str(dataset).strip():
        raise SourceError("the name of the data set is empty; is a variable not set? (this folder is: .)")
    is_remote = isinstance(dataset, str) and is_url(dataset)
    name, locations = locate_url(str(dataset)) if is_remote else locate(Path(dataset))
    _check_one_format(locations)
    return name, [_part(location, encoding=encoding) for location in locations]


def job_name(dataset: str | Path) -> str:
    """What a job of this data set is called by default: the file's name, or that of the folder it is in."""
    if isinstance(dataset, str) and is_url(dataset):
        fixed = fixed_part(Path(PurePosixPath(public_url(dataset))))
    else:
        path = Path(dataset).expanduser()
        fixed = path.resolve() if path.is_dir() else fixed_part(path) if not path.exists() else path
        fixed = fixed if fixed.name else fixed.resolve()
    return fixed.name.split(".")[0] or "job"


def print_of(dataset: object) -> str | None:
    """A digest of the names, sizes and times of a data set's files; None where they cannot be told without reading.

    Two that are equal mean files that nobody wrote to in between. Files that are not there have none.
    """
    if not isinstance(dataset, (str, Path)) or str(dataset) == "-" or (isinstance(dataset, str) and is_url(dataset)):
        return None
    state = blake2b(digest_size=16)
    try:
        for location in locate(Path(dataset))[1]:
            path = Path(location.shown).resolve()
            about = path.stat()
            state.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode(errors="surrogateescape"))
    except (OSError, SourceError):
        return None
    return state.hexdigest()


def _check_one_format(locations: Sequence[Location]) -> None:
    """Files of several formats in one folder are more often a mistake than a data set."""
    examples: dict[str, Location] = {}
    for location in locations:
        examples.setdefault(_KINDS[_format_suffix(location)], location)
    if len(examples) > 1:
        shown = ", ".join(f"{kind} ({example.name})" for kind, example in list(examples.items())[:_SHOWN_KINDS])
        raise SourceError(
            f"the data set has files of several formats: {shown}; name those of one, for example by a pattern: "
            f"'*{_format_suffix(locations[0])}'"
        )


def _part(location: Location, *, encoding: str) -> Part:
    suffix = _format_suffix(location)
    if _KINDS[suffix] == "Parquet":
        with needed_for("Parquet", install="batchmill[parquet]"):
            from .source_parquet import parquet_part
        return parquet_part(location)
    if _KINDS[suffix] == "Arrow":
        with needed_for("Arrow", install="batchmill[parquet]"):
            from .source_arrow import arrow_part
        return arrow_part(location)
    read = partial(_read_text, location, suffix, encoding)
    return Part(name=location.name, read=read, where=partial(_line, location.shown))


def _line(shown: str, line: int) -> str:
    return f"{shown} line {line}"


def _read_stdin(encoding: str) -> Iterator[Parsed]:
    return read_jsonl(open_stdin(encoding=encoding))


def _read_text(location: Location, suffix: str, encoding: str) -> Iterator[Parsed]:
    blocks = open_file(location, encoding=encoding)
    if suffix in _DELIMITERS:
        return read_csv(blocks, name=location.shown, delimiter=_DELIMITERS[suffix])
    return read_json(blocks, name=location.shown) if suffix == ".json" else read_jsonl(blocks)


def _format_suffix(location: Location) -> str:
    suffixes = list(location.suffixes)
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    if suffixes and suffixes[-1] in _OTHER_PACKINGS:
        raise SourceError(f"{location.shown}: {suffixes[-1]} is not read; unpack it, or pack it with gzip or zstd")
    if not suffixes or suffixes[-1] not in _KINDS:
        raise SourceError(
            f"{location.shown} has no known suffix; known ones: {', '.join(FORMATS)}, each also with .gz or "
            ".zst (JSON Lines can also come on standard input: -); of a folder, name the files that are meant: 'folder/*.csv'"
        )
    return suffixes[-1]
