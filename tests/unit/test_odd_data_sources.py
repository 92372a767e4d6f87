"""Files that are not what their name says, or not quite: correct rows, or one sentence that says what to do."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from batchmill_core.errors import SourceError
from batchmill_producers.chunking import pack_row
from batchmill_producers.prompts import compile_prompt
from batchmill_producers.sources import open_source

LINES = b'{"a": 1}\n{"a": 2}\n'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n"
TAR = b"r.jsonl".ljust(257, b"\0") + b"ustar\x0000" + b"\0" * 700


def written(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def inputs(dataset: Any, **options: Any) -> list[Mapping[str, Any]]:
    return [row.input for row in open_source(dataset, **options)]


def refusal(dataset: Any, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        inputs(dataset, **options)
    return str(caught.value)


NOT_WHAT_THEY_SEEM = {
    ("r.csv", PAGE): "r.csv is a web page, not data",
    ("r.jsonl", b"\n <HTML>x"): "r.jsonl is a web page, not data",
    ("r.json", b'<?xml version="1.0"?><a/>'): "r.json is XML, which is not read",
    ("r.csv", LFS): "r.csv is a pointer of Git LFS, not the data; fetch it with: git lfs pull",
    ("r.jsonl", LFS): "r.jsonl is a pointer of Git LFS",
    ("r.csv", b"SQLite format 3\0" + b"\0" * 100): "r.csv is an SQLite database",
    ("r.csv", b"%PDF-1.7\n\x80"): "r.csv is a PDF",
    ("r.jsonl", bz2.compress(LINES)): "r.jsonl is bzip2 data; unpack it, or pack it with gzip or zstd",
    ("r.csv", bz2.compress(LINES, 1)): "r.csv is bzip2 data",
    ("r.jsonl", lzma.compress(LINES)): "r.jsonl is xz data",
    ("r.jsonl", b"\x04\x22\x4d\x18abc"): "r.jsonl is LZ4 data",
    ("r.jsonl.gz", gzip.compress(TAR, mtime=0)): "r.jsonl.gz is a tar archive",
    ("r.jsonl.gz", gzip.compress(gzip.compress(LINES, mtime=0), mtime=0)): "r.jsonl.gz is compressed twice",
    ("r.jsonl.gz", gzip.compress(zstandard.compress(LINES), mtime=0)): "r.jsonl.gz is compressed twice",
    ("r.jsonl.bz2", bz2.compress(LINES)): ".bz2 is not read; unpack it, or pack it with gzip or zstd",
    ("r.tar.gz", gzip.compress(TAR, mtime=0)): ".tar is not read; unpack it",
    ("r.zip", b"PK\x03\x04"): ".zip is not read; unpack it",
    ("r.csv", "a\n1\n".encode("utf-16-le")): "UTF-16 text without a mark? read it with --encoding utf-16-le",
    ("r.jsonl", '{"a": 1}\n'.encode("utf-16-be")): "read it with --encoding utf-16-be",
    ("r.json", '[{"a": 1}]'.encode("utf-16-le")): "read it with --encoding utf-16-le",
}


@pytest.mark.parametrize(("name", "data"), NOT_WHAT_THEY_SEEM)
def test_what_a_file_is_instead_is_said_with_what_to_do(tmp_path: Path, name: str, data: bytes) -> None:
    words = refusal(written(tmp_path, name, data), skip_bad_rows=True)

    assert NOT_WHAT_THEY_SEEM[name, data] in words
    assert "\n" not in words


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_the_encoding_that_is_named_reads_it(tmp_path: Path, encoding: str) -> None:
    assert inputs(written(tmp_path, "r.csv", "a,b\n1,é\n".encode(encoding)), encoding=encoding) == [
        {"a": "1", "b": "é"}
    ]


def test_words_of_other_formats_within_the_data_are_data(tmp_path: Path) -> None:
    assert inputs(written(tmp_path, "r.csv", "page\n<html>\n%PDF-\n")) == [{"page": "<html>"}, {"page": "%PDF-"}]


# Syntax that people get wrong


WRONG_JSON = {
    (
        "r.jsonl",
        '[\n{"a": 1}\n]\n',
    ): "line 1: not valid JSON: Expecting value at column 2; a file that is one JSON array must",
    ("r.jsonl", '{\n"a": 1\n}\n'): "an object has to stand on one line (as `jq -c .` writes it)",
    ("r.jsonl", '{"a": 1},\n{"a": 2}\n'): "take out the comma at the end of the line",
    ("r.jsonl", "a,b\n1,2\n"): "a file of comma-separated values must be named .csv",
    ("r.jsonl", '{"a": 1}{"a": 2}\n'): "line 1: not valid JSON: Extra data at column 9",
    ("r.json", '[{"a": 1},\n]'): "line 2: not valid JSON: there is a comma before the end of the array; take it out",
    ("r.json", '[{"a": 1}, {"a":'): "starts on line 1 is not valid JSON: the file ends within it; is it cut short?",
    ("r.json", '[{"a": 1}, {"a": x}]'): "starts on line 1 is not valid JSON: Expecting value",
    ("r.json", '[{"a": 1}'): "']' expected, but the file ends",
}


@pytest.mark.parametrize(("name", "text"), WRONG_JSON)
def test_wrong_json_is_told_with_its_line_and_the_usual_reason(tmp_path: Path, name: str, text: str) -> None:
    assert WRONG_JSON[name, text] in refusal(written(tmp_path, name, text))


@pytest.mark.parametrize("depth", [300, 600, 985, 1200, 100_000])
@pytest.mark.parametrize("name", ["r.json", "r.jsonl"])
def test_a_row_of_any_depth_is_stored_or_refused_in_words(tmp_path: Path, name: str, depth: int) -> None:
    row = '{"a": ' + "[" * depth + "]" * depth + "}"
    path = written(tmp_path, name, f"[{row}]" if name == "r.json" else row)

    try:
        found = [pack_row(r, compile_prompt("{{ row | length }}").render(r)) for r in open_source(path)]
    except SourceError as refused:
        assert "nested too deeply" in str(refused)  # noqa: PT017  # either is right, by the format and the depth
        assert depth > 300 or name == "r.json"
    else:
        assert json.loads(found[0].request)["messages"][0]["content"] == "1"


# Separators


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_a_csv_is_separated_by_what_its_header_shows(tmp_path: Path, separator: str, end: str) -> None:
    text = end.join(separator.join(cells) for cells in (("a", "b"), ("1", '"x;,|y"'), ("2", "z"))) + end

    assert inputs(written(tmp_path, "r.csv", text)) == [{"a": "1", "b": "x;,|y"}, {"a": "2", "b": "z"}]


def test_a_header_with_a_comma_is_separated_by_commas(tmp_path: Path) -> None:
    assert inputs(written(tmp_path, "r.csv", "a;x,b\n1;2,3\n")) == [{"a;x": "1;2", "b": "3"}]


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;"])
def test_the_line_by_which_excel_says_the_separator_is_no_data(tmp_path: Path, first: str) -> None:
    rows = list(open_source(written(tmp_path, "r.csv", f"{first}\r\na;b\r\n1;2,5\r\n")))

    assert [(r.input, r.line) for r in rows] == [({"a": "1", "b": "2,5"}, 3)]


def test_one_column_without_any_separator_stays_one(tmp_path: Path) -> None:
    assert inputs(written(tmp_path, "r.csv", "\ntext\na;b\nc\n")) == [{"text": "a;b"}, {"text": "c"}]


# Names and streams


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    written(tmp_path, "r.jsonl", LINES)
    monkeypatch.chdir(tmp_path)

    assert "the name of the data set is empty; is a variable not set?" in refusal(name)


def test_a_link_to_nowhere_says_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").symlink_to("gone.jsonl")

    assert "r.jsonl is a link to gone.jsonl, which is not there" in refusal(tmp_path / "r.jsonl")


def test_a_named_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(LINES,), daemon=True)
    writer.start()

    assert inputs(path) == [{"a": 1}, {"a": 2}]


def test_a_standard_input_that_is_closed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)

    assert "standard input is closed; name a file" in refusal("-")


@pytest.mark.parametrize("encoding", ["undefined", "base64", "nosuch"])
def test_an_encoding_of_no_text_is_refused(tmp_path: Path, encoding: str) -> None:
    assert f"encoding {encoding!r} is not known" in refusal(written(tmp_path, "r.csv", "a\n1\n"), encoding=encoding)


def test_a_file_that_grows_while_it_is_read_gives_what_it_held_at_the_end(tmp_path: Path) -> None:
    path = written(tmp_path, "r.jsonl", LINES)
    found = []
    for row in open_source(path):
        found.append(row.input["a"])
        if row.index == 0:
            with path.open("ab") as more:
                more.write(b'{"a": 3}\n')

    assert found == [1, 2, 3]


@pytest.mark.parametrize("name", ["r.jsonl", "r.csv"])
def test_a_file_that_is_cut_while_it_is_read_ends_with_whole_rows_or_a_refusal(tmp_path: Path, name: str) -> None:
    line = '{"a": "%s"}\n' if name == "r.jsonl" else '"%s"\n'
    path = written(tmp_path, name, ("" if name == "r.jsonl" else "a\n") + line % ("x" * 1000) * 1000)
    rows = iter(open_source(path))
    found = [next(rows).input["a"]]
    os.truncate(path, path.stat().st_size - 500)

    with pytest.raises(SourceError, match=f"{name} line"):
        found.extend(row.input["a"] for row in rows)
    assert set(found) == {"x" * 1000}


# Ids


IDS: dict[str, tuple[list[Any], str]] = {
    "null": ([None], "holds 'None'; an id must be a text or a number"),
    "not a number": ([float("nan")], "an id must be a text or a number"),
    "a truth": ([True], "holds 'True'; an id must be a text or a number"),
    "empty": ([""], "an id must be a text or a number"),
    "1 and '1'": ([1, "1"], "row 2: id '1' was already on row 1; ids must be unique"),
}


@pytest.mark.parametrize("case", IDS)
def test_ids_that_cannot_name_a_row_are_refused(case: str) -> None:
    values, words = IDS[case]

    assert words in refusal([{"id": value} for value in values], id_column="id")


@pytest.mark.parametrize(
    "values", [[1, 1.0], ["e\u0301", "\u00e9"], ["a", "A"], ["a", "a "], ["x\ny", "x"], ["x" * 5000, 10**30]]
)
def test_ids_that_differ_as_texts_are_taken_as_they_are(values: list[Any]) -> None:
    rows = list(open_source([{"id": value} for value in values], id_column="id"))

    assert [r.custom_id for r in rows] == [str(v) for v in values]
