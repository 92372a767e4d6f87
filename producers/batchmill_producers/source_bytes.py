"""Opens a data file as blocks of UTF-8 bytes, whatever its compression and encoding, and cuts them at line ends."""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO

import zstandard

from batchmill_core.errors import SourceError

from .source_marks import GZIP_MAGIC, UTF8_BOM, ZSTD_MAGIC, refuse_foreign, refuse_wide

if TYPE_CHECKING:
    from .source_parts import Location

BLOCK_BYTES = 256 * 1024
# zstd can blow up a block of input several hundred times, so what is fed to it at once is kept small.
_ZSTD_BLOCK_BYTES = 16 * 1024
_HEAD_BYTES = 8  # the longest of the marks that tell a format or an encoding
COMPRESSED_SUFFIXES = (".gz", ".zst")


def open_file(location: Location, *, encoding: str) -> Iterator[bytes]:
    """Blocks of a file, decompressed and as UTF-8 without a byte order mark. Raises SourceError naming the file."""
    with location.opened() as raw:
        yield from _decoded(raw, name=location.shown, encoding=encoding, must_be=location.suffix)


def open_stdin(*, encoding: str) -> Iterator[bytes]:
    """Blocks of standard input, decompressed and as UTF-8. Raises SourceError where it is closed."""
    if sys.stdin is None:
        raise SourceError("standard input is closed; name a file, or pipe JSON Lines in")
    yield from _decoded(sys.stdin.buffer, name="stdin", encoding=encoding, must_be="")


def check_encoding(encoding: str) -> None:
    """Raises SourceError unless Python knows ``encoding`` as an encoding of text."""
    try:
        "".encode(encoding)
    except (LookupError, UnicodeError) as error:
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
    blocks = _text_blocks(raw, name=name, must_be=must_be)
    if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig", "ascii"):
        blocks = _as_utf8(blocks, name=name, encoding=encoding)
    return _without_bom(blocks, name=name)


def decompressed(raw: BinaryIO, *, name: str, must_be: str) -> tuple[Iterator[bytes], bool]:
    """Blocks of a stream that may be gzip or zstd data, and whether it is neither.

    ``must_be`` is the last suffix. Raises SourceError, now or on the way, for data that is cut short or damaged.
    """
    head = _head(raw)
    if head.startswith(GZIP_MAGIC):
        return _gunzipped(_Rejoined(head, raw), name=name), False
    if head.startswith(ZSTD_MAGIC):
        return _unzstd(chain([head], _blocks(raw, _ZSTD_BLOCK_BYTES)), name=name), False
    if must_be in COMPRESSED_SUFFIXES and not head:
        raise SourceError(f"{name} is empty: not even compressed data; fetch or write it again")
    if must_be in COMPRESSED_SUFFIXES:
        kind = "gzip" if must_be == ".gz" else "zstd"
        raise SourceError(f"{name} ends in {must_be} but is not {kind} data; rename it, or fetch it again")
    return chain([head], _blocks(raw, BLOCK_BYTES)) if head else iter(()), True


def _text_blocks(raw: BinaryIO, *, name: str, must_be: str) -> Iterator[bytes]:
    blocks, _ = decompressed(raw, name=name, must_be=must_be)
    first = next(blocks, b"")
    refuse_foreign(first, name=name)
    return chain([first], blocks) if first else blocks


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
    refuse_wide(head[:BLOCK_BYTES], name=name)
    if head:
        yield head.removeprefix(UTF8_BOM)
    yield from blocks


def _blocks(raw: BinaryIO | gzip.GzipFile, size: int) -> Iterator[bytes]:
    return iter(lambda: _some(raw, size), b"")


def _some(raw: BinaryIO | gzip.GzipFile, size: int) -> bytes:
    """Up to ``size`` bytes; of a pipe what has come, since the next bytes may take hours."""
    found: bytes = getattr(raw, "read1", raw.read)(size)
    return found


def _head(raw: BinaryIO) -> bytes:
    """The first bytes, enough of them to tell what they are."""
    head = b""
    while len(head) < _HEAD_BYTES and (more := _some(raw, _ZSTD_BLOCK_BYTES - len(head))):
        head += more
    return head


class _Rejoined:
    """A stream whose first bytes were read already, for pipes, which cannot seek back."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        if not self._head:
            return _some(self._rest, size)
        given, self._head = self._head[:size], self._head[size:]
        return given
