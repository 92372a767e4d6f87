"""Finds the files of a data set that lies behind a URL, by fsspec: s3://, gs://, https://, memory://, file:// and more."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from batchmill_core.errors import BatchmillError, ConfigurationError, SourceError

from .extras import needed_for
from .source_local import is_data
from .source_parts import Location

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
_USER = re.compile("//[^/@]*@")
_WEB = ("http", "https")
_EXTRAS = {
    "s3": "batchmill[s3]",
    "s3a": "batchmill[s3]",
    "gs": "batchmill[gcs]",
    "gcs": "batchmill[gcs]",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
}


def is_url(dataset: str) -> bool:
    """Whether a data set is named by a URL."""
    return _URL.match(dataset) is not None


def public_url(url: str) -> str:
    """The URL without what may be secret: users and passwords, and the query of a web address, where tokens stand."""
    plain = _USER.sub("//", url)
    return re.split("[?#]", plain, maxsplit=1)[0] if plain.partition(":")[0].lower() in _WEB else plain


def locate_url(url: str) -> tuple[str, list[Location]]:
    """The name of a data set and its files in the order of their paths: one file, a folder, or a pattern.

    Raises ConfigurationError when a library is missing, SourceError when nothing is there or it cannot be reached.
    """
    shown = public_url(url)
    scheme = url.partition(":")[0].lower()
    with needed_for(f"{scheme}:// data", install=_EXTRAS.get(scheme, "fsspec")), _translated(shown, url):
        from fsspec.core import url_to_fs

        files, path = url_to_fs(url)
    if scheme in _WEB:  # a query is no pattern, and the web has no folders
        return PurePosixPath(shown).name, [_location(files, path, name=PurePosixPath(shown).name, shown=shown)]
    with _translated(shown, url):
        base, paths = _found(files, path)
    if not paths:
        raise SourceError(f"no file at {shown}; look with: python -m fsspec.gui, or the provider's own tool")
    named = sorted((_below(p, base), p) for p in paths)
    locations = [_location(files, p, name=n, shown=public_url(files.unstrip_protocol(p))) for n, p in named]
    return PurePosixPath(path).name or shown, locations


def _found(files: Any, path: str) -> tuple[str, list[str]]:
    """The folder that names are told from, and the paths of the data set's files."""
    if glob.has_magic(path) and not files.exists(path):
        parts = path.split("/")
        first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        return "/".join(parts[:first]), [p for p in files.glob(path) if files.isfile(p)]
    if files.isdir(path):
        return path, [p for p in files.find(path) if is_data(PurePosixPath(_below(p, path)))]
    return path.rpartition("/")[0], [path] if files.exists(path) else []


def _below(path: str, base: str) -> str:
    return path.removeprefix(base.rstrip("/")).lstrip("/")


def _location(files: Any, path: str, *, name: str, shown: str) -> Location:
    suffixes = tuple(s.lower() for s in PurePosixPath(urlsplit(path).path if "://" in path else path).suffixes)
    return Location(name=name, shown=shown, suffixes=suffixes, open=partial(_opened, files, path, shown))


def _opened(files: Any, path: str, shown: str) -> BinaryIO:
    with _translated(shown, path):
        return cast(BinaryIO, _Remote(files.open(path, "rb"), path, shown))


@contextmanager
def _translated(shown: str, url: str) -> Iterator[None]:
    """What a file system raises, which may be anything of its vendor's, as a SourceError; ``url`` is not shown."""
    try:
        yield
    except (BatchmillError, ImportError):
        raise
    except FileNotFoundError as error:
        raise SourceError(f"no file at {shown}") from error
    except Exception as error:  # each file system has an error tree of its own
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            raise ConfigurationError(f"{shown}: fsspec knows no {shown.partition(':')[0]}:// URLs") from error
        raise SourceError(f"{shown} cannot be read: {type(error).__name__}: {_hidden(error, url, shown)}") from error


def _hidden(error: Exception, url: str, shown: str) -> str:
    return str(error).replace(url, shown)


class _Remote:
    """A file behind a URL, whose errors are SourceErrors."""

    def __init__(self, file: Any, path: str, shown: str) -> None:
        self._file = file
        self._path = path
        self._shown = shown

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def read(self, size: int = -1) -> bytes:
        with _translated(self._shown, self._path):
            return bytes(self._file.read(size))

    def seek(self, offset: int, whence: int = 0) -> int:
        with _translated(self._shown, self._path):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        with _translated(self._shown, self._path):
            return int(self._file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
