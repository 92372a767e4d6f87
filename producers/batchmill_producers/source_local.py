"""Finds the files of a data set that lies on this machine: one file, a folder, or a pattern."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterable
from pathlib import Path, PurePath

from batchmill_core.errors import SourceError

from .source_parts import Location


def locate(given: Path) -> tuple[str, list[Location]]:
    """The name of a data set and its files in the order of their paths. Raises SourceError when there is none.

    Of a folder all files below it count but those whose name, or folder's name, begins with a dot or underscore, as
    table writers call what is not data. Rows carry the path below the folder as their source.
    """
    path = given.expanduser()
    if path.is_symlink() and not path.exists():
        raise SourceError(f"{path} is a link to {path.readlink()}, which is not there")
    if path.is_dir():
        return path.resolve().name, _located(_files_below(path), base=path)
    if path.exists():
        return path.name, _located([path], base=path.parent)
    if glob.has_magic(str(path)):
        base = fixed_part(path)
        return str(path.relative_to(base)), _located(_matches(path, base=base), base=base)
    raise SourceError(f"no file {path}{_near(path)} (looked from {Path.cwd()})")


def fixed_part(pattern: Path) -> Path:
    """The folder that a pattern starts from: all before the first part with a wildcard."""
    parts = pattern.parts
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:first])


def is_data(below: PurePath) -> bool:
    """Whether a file of a folder counts: hidden ones, ``_SUCCESS`` and the like do not."""
    return not any(part.startswith((".", "_")) for part in below.parts)


def _files_below(folder: Path) -> list[Path]:
    files = [p for p in folder.rglob("*") if is_data(p.relative_to(folder)) and p.is_file()]
    if not files:
        raise SourceError(f"the folder {folder} holds no data files")
    return files


def _matches(pattern: Path, *, base: Path) -> list[Path]:
    found = glob.iglob(str(pattern), recursive=True)  # noqa: PTH207  # as a shell does it: hidden files do not match
    files = [p for p in map(Path, found) if p.is_file()]
    if not files:
        there = "" if base.is_dir() else f": there is no folder {base}"
        raise SourceError(f"no file matches {pattern}{there} (looked from {Path.cwd()})")
    return files


def _located(paths: Iterable[Path], *, base: Path) -> list[Location]:
    ordered = sorted(set(paths), key=lambda p: p.parts)
    return [_location(p, name=p.relative_to(base).as_posix()) for p in ordered]


def _location(path: Path, *, name: str) -> Location:
    suffixes = tuple(s.lower() for s in path.suffixes)
    return Location(name=name, shown=str(path), suffixes=suffixes, open=lambda: path.open("rb"), path=path)


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f": there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""
