"""Tells by its first bytes what a file is instead of the text that its name promises."""

from __future__ import annotations

from batchmill_core.errors import SourceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
UTF8_BOM = b"\xef\xbb\xbf"
_MARK_BYTES = 64  # more than the longest mark of another format
_TAR_AT = 257  # where a tar archive has its mark
# UTF-32-LE starts like UTF-16-LE, so it is looked for first.
_WIDE_BOMS = (
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_FOREIGN_MAGIC = (
    (b"PK\x03\x04", "a ZIP archive or Excel workbook, not text; export it as .jsonl or .csv"),
    (b"PAR1", "a Parquet file, not text; name it .parquet"),
    (b"ARROW1", "an Arrow file, not text; name it .arrow"),
    *((b"BZh%d1AY&SY" % level, "bzip2 data; unpack it, or pack it with gzip or zstd") for level in range(1, 10)),
    (b"\xfd7zXZ\0", "xz data; unpack it, or pack it with gzip or zstd"),
    (b"\x04\x22\x4d\x18", "LZ4 data; unpack it, or pack it with gzip or zstd"),
    (b"SQLite format 3\0", "an SQLite database, not text; export the table as .csv or .jsonl"),
    (b"%PDF-", "a PDF, not text; export its data as .jsonl or .csv"),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS, not the data; fetch it with: git lfs pull"),
    (b"<!doctype html", "a web page, not data; was a page about an error or a login saved? fetch it again"),
    (b"<html", "a web page, not data; was a page about an error or a login saved? fetch it again"),
    (b"<?xml", "XML, which is not read; export it as .jsonl or .csv"),
    (GZIP_MAGIC, "compressed twice; unpack it once"),
    (ZSTD_MAGIC, "compressed twice; unpack it once"),
)


def refuse_foreign(first: bytes, *, name: str) -> None:
    """Raises SourceError when these bytes begin a file of another format, saying what to do with it."""
    begins = first.removeprefix(UTF8_BOM).lstrip(b" \t\r\n")[:_MARK_BYTES]
    for magic, advice in _FOREIGN_MAGIC:
        if begins.startswith(magic) or (magic.islower() and begins.lower().startswith(magic)):
            raise SourceError(f"{name} is {advice}")
    if first[_TAR_AT:].startswith(b"ustar"):
        raise SourceError(f"{name} is a tar archive; unpack it, and name its files or their folder")


def refuse_wide(head: bytes, *, name: str) -> None:
    """Raises SourceError when these bytes begin UTF-16 or UTF-32 text that was not named as such."""
    for bom, encoding in _WIDE_BOMS:
        if head.startswith(bom):
            raise SourceError(f"{name} is {encoding.upper()} text; read it with --encoding {encoding}")
    if wide := _wide_without_bom(head):
        raise SourceError(f"{name} is full of NUL bytes: UTF-16 text without a mark? read it with --encoding {wide}")


def _wide_without_bom(head: bytes) -> str:
    """The encoding in which every second byte of plain text is NUL; none for text that holds a NUL here and there."""
    even, odd = head[::2], head[1::2]
    if odd.count(0) * 2 > len(odd) and even.count(0) * 4 < len(even):
        return "utf-16-le"
    return "utf-16-be" if even.count(0) * 2 > len(even) and odd.count(0) * 4 < len(odd) else ""
