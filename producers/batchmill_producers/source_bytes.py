"""Opens a data file as blocks of UTF-8 bytes, whatever its compression and encoding, and cuts them at line ends."""

from __future__ import annotations

import codecs
import difflib
import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import zstandard

from batchmill_core.errors import SourceError

BLOCK_BYTES = 256 * 1024
# zstd can blow up a block of input several hundred times, so what is fed to it at once is kept small.
_ZSTD_BLOCK_BYTES = 16 * 1024
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_UTF8_BOM = b"\xef\xbb\xbf"
# UTF-32-LE starts like UTF-16-LE, so it is looked for first.
_WIDE_BOMS = (
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_FOREIGN_MAGIC = ((b"PK\x03\x04", "a ZIP archive or Excel workbook"), (b"PAR1", "a Parquet file"))
COMPRESSED_SUFFIXES = (".gz", ".zst")


def open_file(path: Path, *, encoding: str) -> Iterator[bytes]:
    """Blocks of a file, decompressed and as UTF-8 without a byte order mark. Raises SourceError naming the file."""
    check_readable(path)
    try:
        with path.open("rb") as raw:
            yield from _decoded(raw, name=str(path), encoding=encoding, must_be=path.suffix.lower())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def open_stdin(*, encoding: str) -> Iterator[bytes]:
    """Blocks of standard input, decompressed and as UTF-8."""
    yield from _decoded(sys.stdin.buffer, name="stdin", encoding=encoding, must_be="")


def check_readable(path: Path) -> None:
    """Raises SourceError, with near names and the current folder, unless ``path`` is a file."""
    if path.is_dir():
        raise SourceError(f"{path} is a directory; give one data file in it, for example {_some_file(path)}")
    if not path.exists():
        raise SourceError(f"no file {path}{_near(path)} (looked from {Path.cwd()})")


def check_encoding(encoding: str) -> None:
    """Raises SourceError unless Python knows ``encoding`` as an encoding of text."""
    try:
        "".encode(encoding)
    except LookupError as error:
        raise SourceError(
            f"encoding {encoding!r} is not known; usual ones are utf-8, utf-16, latin-1, cp1252, shift_jis, gb18030"
        ) from error


def whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Regroups blocks so that each ends at a line end: ``\\n``, ``\\r`` or ``\\r\\n``; the last may lack one.

    Memory is a block or the longest line, whichever is larger. A ``\\r`` that ends a block waits for the next one,
    because ``\\n`` may follow.
    """
    parts: list[bytes] = []
    for block in blocks:
        cut = max(block.rfind(b"\n"), block.rfind(b"\r", 0, -1)) + 1
        if not cut:
            parts.append(block)
            continue
        parts.append(block[:cut])
        yield b"".join(parts)
        parts = [block[cut:]]
    if rest := b"".join(parts):
        yield rest


def _decoded(raw: BinaryIO, *, name: str, encoding: str, must_be: str) -> Iterator[bytes]:
    blocks = _decompressed(raw, name=name, must_be=must_be)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig", "ascii"):
        blocks = _as_utf8(blocks, name=name, encoding=encoding)
    return _without_bom(blocks, name=name)


def _decompressed(raw: BinaryIO, *, name: str, must_be: str) -> Iterator[bytes]:
    head = raw.read(_ZSTD_BLOCK_BYTES)
    if head.startswith(_GZIP_MAGIC):
        return _gunzipped(_Rejoined(head, raw), name=name)
    if head.startswith(_ZSTD_MAGIC):
        return _unzstd(chain([head], _blocks(raw, _ZSTD_BLOCK_BYTES)), name=name)
    if must_be in COMPRESSED_SUFFIXES:
        kind = "gzip" if must_be == ".gz" else "zstd"
        raise SourceError(f"{name} ends in {must_be} but is not {kind} data; rename it, or fetch it again")
    for magic, kind in _FOREIGN_MAGIC:
        if head.startswith(magic):
            raise SourceError(f"{name} is {kind}, not text; export it as .jsonl or .csv")
    return chain([head], _blocks(raw, BLOCK_BYTES)) if head else iter(())


def _gunzipped(raw: _Rejoined, *, name: str) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=raw, mode="rb") as plain:  # type: ignore[call-overload]  # needs read() only
            yield from _blocks(plain, BLOCK_BYTES)
    except EOFError as error:
        raise SourceError(f"{name} is cut short: its gzip data ends too early; fetch it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{name} is damaged: {error}; fetch it again") from error


def _unzstd(blocks: Iterator[bytes], *, name: str) -> Iterator[bytes]:
    # python-zstandard's stream reader takes a cut file for a finished one, hence decompressobj and its eof.
    factory = zstandard.ZstdDecompressor()
    frame = factory.decompressobj()
    try:
        for block in blocks:
            data = block
            while data:
                if frame.eof:
                    frame = factory.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data
    except zstandard.ZstdError as error:
        raise SourceError(f"{name} is damaged: {error}; fetch it again") from error
    if not frame.eof:
        raise SourceError(f"{name} is cut short: its zstd data ends too early; fetch it again")


def _as_utf8(blocks: Iterator[bytes], *, name: str, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    lines = 1
    try:
        for block in blocks:
            text = decoder.decode(block)
            lines += text.count("\n")
            yield text.encode("utf-8", "surrogatepass")
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")
    except UnicodeError as error:
        raise SourceError(
            f"{name} is not {encoding} text, near line {lines}: {error}; name the right one with --encoding"
        ) from error


def _without_bom(blocks: Iterator[bytes], *, name: str) -> Iterator[bytes]:
    head = b""
    for block in blocks:
        head += block
        if len(head) >= 4:
            break
    for bom, encoding in _WIDE_BOMS:
        if head.startswith(bom):
            raise SourceError(f"{name} is {encoding.upper()} text; read it with --encoding {encoding}")
    if head:
        yield head.removeprefix(_UTF8_BOM)
    yield from blocks


def _blocks(raw: BinaryIO | gzip.GzipFile, size: int) -> Iterator[bytes]:
    return iter(lambda: raw.read(size), b"")


class _Rejoined:
    """A stream whose first bytes were read already, for pipes, which cannot seek back."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        if not self._head:
            return self._rest.read(size)
        given, self._head = self._head[:size], self._head[size:]
        return given


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir()]
    except OSError:
        return f": there is no folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""


def _some_file(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    return str(folder / names[0]) if names else "one that ends in .jsonl"
