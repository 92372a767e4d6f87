"""Data sets as people have them: what gives rows, what is refused, and in which words."""

from __future__ import annotations

import gzip
import io
import json
import os
import queue
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core.errors import SourceError
from batchmill_core.request import Row, TaskKind
from batchmill_producers.prompts import compile_prompt
from batchmill_producers.source_bytes import whole_lines
from batchmill_producers.sources import KEPT_BAD_ROWS, open_source

CASES = Path(__file__).parents[1] / "cases" / "inputs"


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def rows(dataset: Any, **options: Any) -> list[Row]:
    return list(open_source(dataset, **options))


def inputs(dataset: Any, **options: Any) -> list[Mapping[str, Any]]:
    return [row.input for row in rows(dataset, **options)]


def refusal(dataset: Any, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        rows(dataset, **options)
    return str(caught.value)


def batch_line(custom_id: str = "r-0", *, url: str = "/v1/chat/completions", **body: Any) -> str:
    full = {"model": "m-1", "messages": [{"role": "user", "content": "a"}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": full}) + "\n"


# What a plain JSON Lines file gives


def test_rows_carry_index_line_and_source(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", '{"a": 1}\n\n{"a": 2}\n')

    assert rows(path) == [
        Row(index=0, input={"a": 1}, source="r.jsonl", line=1),
        Row(index=1, input={"a": 2}, source="r.jsonl", line=3),
    ]


def test_types_and_nesting_arrive_as_they_are(tmp_path: Path) -> None:
    value = {"i": 1, "f": 0.5, "b": True, "n": None, "l": [1, {"x": []}], "d": {"k": "v"}}

    assert inputs(write(tmp_path, "r.jsonl", json.dumps(value))) == [value]


def test_last_line_needs_no_line_end(tmp_path: Path) -> None:
    assert len(rows(write(tmp_path, "r.jsonl", '{"a": 1}\n{"a": 2}'))) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_usual_line_end_works(tmp_path: Path, end: str) -> None:
    path = write(tmp_path, "r.jsonl", end.join(['{"a": 1}', "", "   ", '{"a": 2}', ""]))

    assert [(r.line, r.input) for r in rows(path)] == [(1, {"a": 1}), (4, {"a": 2})]


def test_line_ends_at_block_borders_count_once(tmp_path: Path) -> None:
    long = json.dumps({"t": "x" * (256 * 1024 - 10)})  # the carriage return is the block's last byte
    path = write(tmp_path, "r.jsonl", f'{long}\r\n{{"a": 1}}\r\n')
    assert len(long) == 256 * 1024 - 1

    assert [r.line for r in rows(path)] == [1, 2]


def test_unicode_line_separators_do_not_split_lines(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"

    assert inputs(write(tmp_path, "r.jsonl", json.dumps({"t": text}, ensure_ascii=False))) == [{"t": text}]


@given(st.lists(st.text("ab\r\n", min_size=1)))
def test_pieces_end_at_line_ends_however_blocks_are_cut(blocks: list[str]) -> None:
    data = "".join(blocks).encode()

    pieces = list(whole_lines(block.encode() for block in blocks))

    assert b"".join(pieces) == data
    assert [line for piece in pieces for line in piece.splitlines()] == data.splitlines()


def test_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + b'{"a": 1}\n'
    zipped = zstandard.compress(data)

    assert inputs(write(tmp_path, "r.jsonl", data)) == [{"a": 1}]
    assert inputs(write(tmp_path, "r.jsonl.zst", zipped)) == [{"a": 1}]


def test_integers_of_any_size_keep_their_value(tmp_path: Path) -> None:
    big = 2**80 + 1
    path = write(tmp_path, "r.jsonl", f'{{"a": {big}, "b": {-big}, "c": [{2**64}], "d": {2**63}}}')

    assert inputs(path) == [{"a": big, "b": -big, "c": [2**64], "d": 2**63}]


def test_repeated_key_keeps_its_last_value(tmp_path: Path) -> None:
    assert inputs(write(tmp_path, "r.jsonl", '{"a": 1, "a": 2}')) == [{"a": 2}]


def test_a_line_of_20_mb_is_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", '{"a": 1}\n' + json.dumps({"t": "x" * 20_000_000}) + '\n{"a": 2}\n')

    assert [len(str(i)) > 1000 for i in inputs(path)] == [False, True, False]


# Text that could not be stored


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'"a\u0000b"', "a\ufffdb"),
        ('"a\0b"', "a\ufffdb"),
        (r'"a\ud800b"', "a\ufffdb"),
        (r'"\udc00\ud800"', "\ufffd\ufffd"),
    ],
)
def test_nul_and_lone_surrogates_are_replaced_and_noted(tmp_path: Path, written: str, read: str) -> None:
    (row,) = rows(write(tmp_path, "r.jsonl", f'{{"t": [{written}]}}\n'))

    assert row.input == {"t": [read]}
    assert row.sanitized


def test_whole_surrogate_pairs_and_escaped_backslashes_stay(tmp_path: Path) -> None:
    (row,) = rows(write(tmp_path, "r.jsonl", r'{"t": "\ud83d\ude00", "u": "\\u0000", "v": "\\ud800"}'))

    assert row.input == {"t": "😀", "u": r"\u0000", "v": r"\ud800"}
    assert not row.sanitized


def test_keys_are_mended_like_values(tmp_path: Path) -> None:
    (row,) = rows(write(tmp_path, "r.jsonl", r'{"a\u0000": 1}'))

    assert row.input == {"a\ufffd": 1}
    assert row.sanitized


# Bad lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ', "not valid JSON"),
        ('{"a": 1} trailing', "not valid JSON"),
        ('{"a": NaN}', "NaN is not valid JSON; write null"),
        ('{"a": -Infinity}', "-Infinity is not valid JSON"),
        ('{"a": 1e400}', "too large"),
        ('"hello"', 'a JSON string, not an object; write {"text": "hello"}'),
        ("[1, 2]", "a JSON list, not an object; a file that is one JSON array must be named .json"),
        ("7", "a JSON number, not an object"),
        ("null", "a JSON null, not an object"),
        ("true", "a JSON boolean, not an object"),
        ("\0" * 12, "NUL bytes"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_bad_line_is_refused_with_file_line_reason_and_fix(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, "r.jsonl", f'{{"a": 0}}\n{line}\n')

    message = refusal(path)

    assert f"{path} line 2: " in message
    assert said in message
    assert "--skip-bad-rows" in message


def test_byte_that_is_not_utf8_is_named_with_the_fix(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "r.jsonl", b'{"t": "ok"}\n{"t": "caf\xe9"}\n'))

    assert "line 2: byte 0xe9 at offset 10" in message
    assert "--encoding latin-1" in message


def test_skipped_bad_rows_are_listed_and_leave_no_gap(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "r.jsonl", b'{"a": 0}\n{\n[]\n\xff\n{"a": 1}\n'), skip_bad_rows=True)

    assert [(r.index, r.line) for r in source] == [(0, 1), (1, 5)]
    assert [b.line for b in source.bad_rows] == [2, 3, 4]
    assert "not UTF-8" in source.bad_rows[2].reason


def test_list_of_bad_rows_is_bounded_but_their_count_is_not(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "r.jsonl", "x\n" * 1500 + "{}\n"), skip_bad_rows=True)

    assert len(list(source)) == 1
    assert len(source.bad_rows) == KEPT_BAD_ROWS
    assert source.bad_row_count == 1500


# No rows


@pytest.mark.parametrize(
    ("name", "data"), [("e.jsonl", ""), ("e.jsonl", "\n \n"), ("e.csv", ""), ("e.csv", "a,b\n"), ("e.json", "[]")]
)
def test_data_set_without_rows_is_refused(tmp_path: Path, name: str, data: str) -> None:
    assert f"{name} has no rows" in refusal(write(tmp_path, name, data))


def test_no_rows_says_that_all_were_bad(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "r.jsonl", "x\n"), skip_bad_rows=True)

    assert "has no rows; 1 bad rows were left out, the first at" in message
    assert "not valid JSON" in message


# Compression and encoding


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "data"), [("r.jsonl", '{"a": "1"}\n'), ("r.NDJSON", '{"a": "1"}'), ("r.csv", "a\n1\n")]
)
def test_compressed_files_read_like_plain_ones(tmp_path: Path, name: str, data: str, suffix: str) -> None:
    compress = gzip.compress if suffix == ".gz" else zstandard.compress

    assert inputs(write(tmp_path, name + suffix, compress(data.encode()))) == [{"a": "1"}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_files_of_several_compressed_parts_are_read_whole(tmp_path: Path, suffix: str) -> None:
    compress = gzip.compress if suffix == ".gz" else zstandard.compress
    path = write(tmp_path, "r.jsonl" + suffix, compress(b'{"a": 1}\n') + compress(b'{"a": 2}\n'))

    assert inputs(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [10, 0.5, -1])
def test_cut_compressed_file_is_refused_by_name(tmp_path: Path, suffix: str, keep: float) -> None:
    compress = gzip.compress if suffix == ".gz" else zstandard.compress
    data = compress("".join(f'{{"a": {i * i}}}\n' for i in range(20_000)).encode())
    end = int(len(data) * keep) if isinstance(keep, float) else int(keep)

    message = refusal(write(tmp_path, "r.jsonl" + suffix, data[:end]))

    assert "r.jsonl" + suffix in message
    assert "cut short" in message


def test_damaged_gzip_is_refused_by_name(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b'{"a": 1}\n' * 100))
    data[20] ^= 0xFF

    assert "r.jsonl.gz is" in refusal(write(tmp_path, "r.jsonl.gz", bytes(data)))


def test_compression_is_told_by_content_where_the_name_does_not(tmp_path: Path) -> None:
    assert inputs(write(tmp_path, "r.jsonl", gzip.compress(b'{"a": 1}'))) == [{"a": 1}]


def test_plain_text_named_gz_is_refused(tmp_path: Path) -> None:
    assert "is not gzip data" in refusal(write(tmp_path, "r.jsonl.gz", '{"a": 1}'))


def test_workbook_named_csv_is_refused(tmp_path: Path) -> None:
    assert "Excel workbook" in refusal(write(tmp_path, "r.csv", b"PK\x03\x04 and so on"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize(("name", "text"), [("r.jsonl", '{"t": "é"}\n'), ("r.csv", "t\né\n")])
def test_wide_text_names_the_encoding_and_reads_with_it(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    path = write(tmp_path, name, text.encode(encoding))

    assert f"--encoding {encoding}" in refusal(path)
    assert inputs(path, encoding=encoding) == [{"t": "é"}]


def test_text_that_is_not_in_the_named_encoding_is_refused(tmp_path: Path) -> None:
    assert "is not cp1252 text, near line" in refusal(write(tmp_path, "r.csv", b"a\n\x81\n"), encoding="cp1252")


@pytest.mark.parametrize("encoding", ["latni-1", "base64"])
def test_unknown_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    assert f"encoding {encoding!r} is not known" in refusal(write(tmp_path, "r.csv", "a\n1\n"), encoding=encoding)


# Paths


def test_missing_file_is_named_with_near_names(tmp_path: Path) -> None:
    write(tmp_path, "reviews.jsonl", "{}")

    message = refusal(tmp_path / "review.jsonl")

    assert f"no file {tmp_path / 'review.jsonl'}; did you mean {tmp_path / 'reviews.jsonl'}?" in message
    assert str(Path.cwd()) in message


def test_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'nowhere'}" in refusal(tmp_path / "nowhere" / "r.jsonl")


@pytest.mark.parametrize("name", ["r.txt", "r", "r.gz", "r.xlsx"])
def test_unknown_suffix_names_the_known_ones(tmp_path: Path, name: str) -> None:
    message = refusal(write(tmp_path, name, "{}"))

    assert ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow" in message


def test_standard_input_is_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}\n{"a": 2}\n')))

    assert [(r.source, r.line) for r in rows("-")] == [("stdin", 1), ("stdin", 2)]


def plainly(out: Any) -> Any:
    return out


def zipped(out: Any) -> Any:
    return gzip.GzipFile(fileobj=out, mode="wb")


def zstd_packed(out: Any) -> Any:
    return zstandard.ZstdCompressor().stream_writer(out)


@pytest.mark.parametrize("packed", [plainly, zipped, zstd_packed])
def test_rows_of_a_pipe_come_as_they_are_written(monkeypatch: pytest.MonkeyPatch, packed: Callable[[Any], Any]) -> None:
    reading, writing = os.pipe()
    come: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.FileIO(reading))))
    reader = threading.Thread(target=lambda: [come.put(row.input["n"]) for row in open_source("-")], daemon=True)
    seen = []

    with io.FileIO(writing, "w") as raw, packed(raw) as out:
        reader.start()
        for n in range(3):
            out.write(b'{"n": %d}\n' % n)
            out.flush()
            seen.append(come.get(timeout=20))  # the next is written when this one has been read
    reader.join(20)

    assert seen == [0, 1, 2]
    sys.stdin.close()


@pytest.mark.parametrize("after", ['[{"a": 2}]', '\n{"a": 2}', "x"])
def test_what_follows_a_json_array_is_not_left_out_without_a_word(tmp_path: Path, after: str) -> None:
    assert "follows after the end of the array" in refusal(write(tmp_path, "r.json", f'[{{"a": 1}}]{after}'))


def test_an_array_that_is_packed_is_read_to_the_end_of_the_packing(tmp_path: Path) -> None:
    data = gzip.compress(b'[{"a": 1}]' + b" " * 100_000)

    assert "cut short" in refusal(write(tmp_path, "r.json.gz", data[:-20]))


def test_one_object_over_many_lines_is_told_what_a_json_file_holds(tmp_path: Path) -> None:
    words = refusal(write(tmp_path, "r.json", '{\n  "data": [{"a": 1}]\n}\n'))

    assert "r.json line 1" in words
    assert "one array of objects, or one object per line" in words


@pytest.mark.parametrize("inner", [gzip.compress, zstandard.compress])
def test_what_was_packed_twice_is_told_so(tmp_path: Path, inner: Callable[[bytes], bytes]) -> None:
    assert "compressed twice" in refusal(write(tmp_path, "r.jsonl.gz", gzip.compress(inner(b'{"a": 1}\n'))))


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.csv.zst"])
def test_an_empty_file_with_a_packed_ones_name_is_called_empty(tmp_path: Path, name: str) -> None:
    assert f"{name} is empty" in refusal(write(tmp_path, name, b""))


# CSV and TSV


def test_cells_are_strings_and_may_hold_line_ends_and_quotes(tmp_path: Path) -> None:
    path = write(tmp_path, "r.csv", 'id,text\r\n1,"two\nlines, ""quoted"""\r\n\r\n02,1.50\r\n')

    assert [(r.line, r.input) for r in rows(path)] == [
        (2, {"id": "1", "text": 'two\nlines, "quoted"'}),
        (5, {"id": "02", "text": "1.50"}),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_takes_every_usual_line_end(tmp_path: Path, end: str) -> None:
    assert [r.line for r in rows(write(tmp_path, "r.csv", end.join(["a,b", "1,2", "3,4"])))] == [2, 3]


def test_tsv_is_split_at_tabs(tmp_path: Path) -> None:
    assert inputs(write(tmp_path, "r.tsv", "a\tb\n1,5\t2\n")) == [{"a": "1,5", "b": "2"}]


def test_csv_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    assert inputs(write(tmp_path, "r.csv", "\ufeffa,b\n1,2\n")) == [{"a": "1", "b": "2"}]


def test_huge_cell_is_read(tmp_path: Path) -> None:
    (row,) = inputs(write(tmp_path, "r.csv", "a,b\n1," + "x" * 2_000_000 + "\n"))

    assert len(row["b"]) == 2_000_000


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("1", "1 cells where the header names 2 columns"),
        ("1,2,3", "3 cells where the header names 2 columns; quote cells"),
        ('1,"a"b', "bad quoting"),
        ('1,"never closed', "never closed, which takes everything up to line 5"),
    ],
)
def test_bad_record_is_refused_with_its_first_line(tmp_path: Path, record: str, said: str) -> None:
    path = write(tmp_path, "r.csv", f'a,b\n"x\ny",2\n{record}\n5,6\n')

    message = refusal(path)

    assert f"{path} line 4: " in message
    assert said in message


def test_bad_records_can_be_skipped(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "r.csv", b'a,b\n1\n"x"y,2\n\xff,1\n3,4\n'), skip_bad_rows=True)

    assert [r.line for r in source] == [5]
    assert [b.line for b in source.bad_rows] == [2, 3, 4]


def test_column_named_twice_is_refused(tmp_path: Path) -> None:
    assert "line 1: the header names 'a' more than once" in refusal(write(tmp_path, "r.csv", "a,b, a\n1,2,3\n"))


def test_header_of_empty_names_is_refused(tmp_path: Path) -> None:
    assert "the header names no column" in refusal(write(tmp_path, "r.csv", ",,\n1,2,3\n"))


def test_one_column_without_a_name_is_called_by_its_place(tmp_path: Path) -> None:
    assert inputs(write(tmp_path, "r.csv", ",text\n0,a\n")) == [{"column_1": "0", "text": "a"}]


def test_nul_in_a_cell_is_replaced_and_noted(tmp_path: Path) -> None:
    first, second = rows(write(tmp_path, "r.csv", "a,b\n1,x\0y\n2,z\n"))

    assert (first.input["b"], first.sanitized) == ("x\ufffdy", True)
    assert not second.sanitized


# A JSON array


def test_json_array_gives_its_objects_with_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "r.json", '\n[\n {"a": "[,]\u00e9"},\n {\n "a": 2}\n,{"a":3}]\n')

    assert [(r.line, r.input) for r in rows(path)] == [(3, {"a": "[,]é"}), (4, {"a": 2}), (6, {"a": 3})]


def test_long_json_array_is_read_whole(tmp_path: Path) -> None:
    values = [{"i": i, "t": "é" * (i % 50)} for i in range(20_000)] + [{"i": -1, "t": "x" * 1_000_000}]

    assert inputs(write(tmp_path, "r.json", json.dumps(values, ensure_ascii=False))) == values


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('[{"a": 1},\n{"a": ]', "element that starts on line 2 is not valid JSON"),
        ('[{"a": 1}\n', "']' expected, but the file ends"),
        ('[{"a": 1} {"a": 2}]', "']' expected, but found '{'"),
        ('[{"a": 1}, 5]', "a JSON number, not an object"),
        ('[{"a": NaN}]', "NaN is not valid JSON"),
        (b'[{"a": "\xe9"}]', "byte 0xe9"),
    ],
)
def test_broken_json_array_is_refused(tmp_path: Path, data: str | bytes, said: str) -> None:
    assert said in refusal(write(tmp_path, "r.json", data))


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert inputs(write(tmp_path, "r.json", '{"a": 1}\n{"a": 2}\n')) == [{"a": 1}, {"a": 2}]


# OpenAI batch files


def test_batch_file_is_recognised_by_its_lines(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "r.jsonl", batch_line("a", max_tokens=20, stream=False)))
    (row,) = source

    assert row.request is not None
    assert row.custom_id == "a"
    assert row.request.task is TaskKind.CHAT
    assert row.request.messages == ({"role": "user", "content": "a"},)
    assert row.request.params == {"max_tokens": 20}
    assert row.input["body"]["model"] == "m-1"


def test_embeddings_line_gives_its_input(tmp_path: Path) -> None:
    line = json.dumps(
        {
            "custom_id": "e",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "m", "input": ["x"], "dimensions": 8},
        }
    )
    (row,) = rows(write(tmp_path, "r.jsonl", line))

    assert row.request is not None
    assert (row.request.task, row.request.inputs, row.request.params) == (TaskKind.EMBED, ("x",), {"dimensions": 8})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (batch_line(stream=True), "body.stream is true"),
        (batch_line(n=3), "body.n is 3"),
        (batch_line(url="/v1/responses"), "url '/v1/responses' cannot be answered"),
        (batch_line(messages=[]), "body.messages: is an empty list"),
        (batch_line(messages=[{"role": "robot", "content": "a"}]), "message 1 has role 'robot'"),
        (batch_line(messages=[{"role": "user"}]), "message 1 has no content"),
        (batch_line(url="/v1/embeddings", input=["a", "b"]), "body.input holds 2 texts"),
        (batch_line(url="/v1/embeddings", input=[1, 2]), "body.input must be a text"),
        (batch_line(""), "the id column 'custom_id' holds ''"),
        (batch_line().replace("custom_id", "id"), "there is no id column 'custom_id'"),
        (batch_line().replace("POST", "GET"), "method is 'GET'"),
        ('{"text": "a"}\n', "it has no 'body' object"),
    ],
)
def test_batch_line_that_cannot_be_answered_is_refused_by_line(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, "r.jsonl", batch_line("first") + line)

    message = refusal(path)

    assert f"{path} line 2: " in message
    assert said in message


def test_repeated_custom_id_names_both_lines(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "r.jsonl", batch_line("x") + "\n" + batch_line("y") + batch_line("x")))

    assert "line 4: id 'x' was already on line 1" in message


def test_data_with_a_url_and_a_body_is_no_batch_file(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", '{"method": "GET", "url": "/", "body": "text"}')

    assert open_source(path).task is None


# Ids


def test_id_column_gives_custom_ids_as_text() -> None:
    assert [r.custom_id for r in rows([{"id": 7}, {"id": "x"}], id_column="id")] == ["7", "x"]


def test_repeated_id_names_both_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "r.csv", "id\n1\n2\n1\n")

    assert "line 4: id '1' was already on line 2" in refusal(path, id_column="id")
    assert "row 2: id '1' was already on row 1" in refusal([{"id": 1}, {"id": "1"}], id_column="id")


def test_repeated_ids_are_left_out_when_bad_rows_are() -> None:
    source = open_source([{"id": 1}, {"id": 1}, {"id": 2}], id_column="id", skip_bad_rows=True)

    assert [(r.index, r.custom_id) for r in source] == [(0, "1"), (1, "2")]
    assert [b.line for b in source.bad_rows] == [2]


def test_missing_id_column_lists_the_columns() -> None:
    assert "there is no id column 'uid'; columns here: id, text" in refusal([{"id": 1, "text": ""}], id_column="uid")


@pytest.mark.parametrize("value", [None, "", [], {"a": 1}, True])
def test_unusable_id_is_refused(value: object) -> None:
    assert "an id must be a text or a number" in refusal([{"id": value}], id_column="id")


# Python objects


def test_python_rows_are_snapshots_without_lines() -> None:
    reused = {"a": 1}

    def produce() -> Iterator[dict[str, int]]:
        for i in range(3):
            reused["a"] = i
            yield reused

    assert rows(produce()) == [Row(index=i, input={"a": i}) for i in range(3)]


def test_strings_become_text_rows() -> None:
    assert inputs(["a", "b"]) == [{"text": "a"}, {"text": "b"}]


def test_python_values_become_json_values() -> None:
    row = {
        "n": float("nan"),
        "d": date(2026, 1, 2),
        "t": (1, 2),
        5: "five",
        "s": "a\0b",
        "big": 2**70,
        "m": Decimal("1.10"),
    }

    (got,) = rows([row])

    assert got.input == {
        "n": None,
        "d": "2026-01-02",
        "t": [1, 2],
        "5": "five",
        "s": "a\ufffdb",
        "big": 2**70,
        "m": "1.10",
    }
    assert got.sanitized


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"a": object()}, "row 1: column 'a': a value of type object cannot be written as JSON"),
        ({"a": float("inf")}, "row 1: column 'a': infinity"),
        ({"a": {1, 2}}, "row 1: column 'a': a value of type set"),
        ({"a": {1: 0, "1": 0}}, "row 1: column 'a': two of its keys are the same"),
        (5, "row 1: a int, not a mapping or a string"),
    ],
)
def test_python_row_that_cannot_be_stored_is_refused(row: object, said: str) -> None:
    assert said in refusal([row])


@pytest.mark.parametrize("dataset", [{"a": 1}, b"bytes", 5])
def test_objects_that_are_no_rows_are_refused(dataset: Any) -> None:
    with pytest.raises(SourceError, match="the data set is"):
        open_source(dataset)


# Using a source


def test_columns_can_be_asked_first_without_losing_a_row() -> None:
    source = open_source(iter([{"a": 1, "b": 2}, {"c": 3}]))

    assert source.columns == ("a", "b")
    assert [r.index for r in source] == [0, 1]


def test_file_can_be_read_twice(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "r.jsonl", "{}\n{\n"), skip_bad_rows=True)

    assert list(source) == list(source)
    assert source.bad_row_count == 1


def test_generator_cannot_be_read_twice() -> None:
    source = open_source(iter([{"a": 1}]))
    list(source)

    with pytest.raises(SourceError, match="can be read only once"):
        iter(source)


def test_limit_counts_accepted_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", "{\n{}\n{}\n{}\n")

    assert [r.line for r in rows(path, limit=2, skip_bad_rows=True)] == [2, 3]
    assert len(rows(write(tmp_path, "r.csv", "a\n1\n2,3\n"), limit=1)) == 1


def test_limit_below_one_is_refused() -> None:
    assert "the limit is 0" in refusal([{"a": 1}], limit=0)


def test_memory_stays_flat_with_ids(tmp_path: Path) -> None:
    def lines(n: int) -> Iterator[dict[str, Any]]:
        return ({"id": f"{i:030d}", "text": "x" * 100} for i in range(n))

    def peak(n: int) -> int:
        tracemalloc.start()
        for _ in open_source(lines(n), id_column="id"):
            pass
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(20_000) < peak(2_000) + 100_000


# Data sets from public bug reports


def test_case_bom() -> None:
    source = open_source(CASES / "bom.jsonl")

    assert source.columns == ("text",)
    assert len(list(source)) == 2


def test_case_crlf_and_blank() -> None:
    assert [r.line for r in rows(CASES / "crlf-and-blank.jsonl")] == [1, 3]


def test_case_bad_line_3() -> None:
    path = CASES / "bad-line-3.jsonl"
    source = open_source(path, skip_bad_rows=True)

    assert "line 3: " in refusal(path)
    assert len(list(source)) == 3
    assert [b.line for b in source.bad_rows] == [3]


def test_case_openai_batch() -> None:
    source = open_source(CASES / "openai-batch.jsonl")

    assert source.task is TaskKind.CHAT
    assert [r.custom_id for r in source] == ["r-0", "r-1", "r-2"]


def test_case_openai_batch_duplicate_id() -> None:
    assert "line 2: id 'same' was already on line 1" in refusal(CASES / "openai-batch-duplicate-id.jsonl")


def test_case_openai_batch_stream_true() -> None:
    assert "line 1: body.stream is true" in refusal(CASES / "openai-batch-stream-true.jsonl")


def test_case_braces() -> None:
    (row,) = rows(CASES / "braces.jsonl")
    request = compile_prompt("Say: {{ text }}").render(row)

    assert request.messages[0]["content"] == "Say: a {b} {{c}} {% d %} e"


def test_case_empty() -> None:
    assert "empty.jsonl has no rows" in refusal(CASES / "empty.jsonl")


def test_case_quotes() -> None:
    first, second = inputs(CASES / "quotes.csv")

    assert first["text"] == 'two\nlines, and a "quote"'
    assert second["text"] == "plain"


def test_case_latin1() -> None:
    path = CASES / "latin1.csv"

    assert "byte 0xe9" in refusal(path)
    assert "--encoding latin-1" in refusal(path)
    assert inputs(path, encoding="latin-1") == [{"id": "1", "text": "café"}]


def test_optional_libraries_are_not_loaded_before_they_are_needed() -> None:
    """They take longer to load than most commands run, and may be missing."""
    code = "import sys, batchmill.cli, batchmill_producers.submit, batchmill_producers.export; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert not {"pyarrow", "pandas", "polars", "fsspec", "numpy"} & set(loaded)
