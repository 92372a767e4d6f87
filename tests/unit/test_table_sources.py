"""Parquet, Arrow and data frames: what each type becomes, how files are read in pieces, and what damage is called."""

from __future__ import annotations

import gzip
import json
import random
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill_core.errors import ConfigurationError, SourceError
from batchmill_core.payload import encode_input
from batchmill_core.request import Row
from batchmill_producers.prompts import compile_prompt
from batchmill_producers.sources import open_source

NOON = datetime(2024, 5, 6, 12, 0, 0)
FORMS: list[tuple[Any, pa.DataType, Any]] = [
    (True, pa.bool_(), True),
    (2**64 - 1, pa.uint64(), 2**64 - 1),
    (-5, pa.int8(), -5),
    (0.1, pa.float64(), 0.1),
    (0.1, pa.float32(), 0.1),
    (0.1, pa.float16(), 0.1),
    (65504.0, pa.float16(), 65504.0),
    (6e-8, pa.float16(), 6e-8),
    (float("nan"), pa.float64(), None),
    ("é", pa.string_view(), "é"),
    ("x", pa.dictionary(pa.int8(), pa.string()), "x"),
    (b"\x00\xff", pa.binary(), "AP8="),
    (Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
    (Decimal("0.000000001"), pa.decimal256(40, 9), "0.000000001"),
    (date(2024, 5, 6), pa.date32(), "2024-05-06"),
    (date(1, 1, 1), pa.date64(), "0001-01-01"),
    (NOON, pa.timestamp("s"), "2024-05-06T12:00:00"),
    (NOON.replace(microsecond=1000), pa.timestamp("ms"), "2024-05-06T12:00:00.001000"),
    (1, pa.timestamp("ns"), "1970-01-01T00:00:00.000000001"),
    (-1, pa.timestamp("us"), "1969-12-31T23:59:59.999999"),
    (NOON.replace(tzinfo=UTC), pa.timestamp("us", tz="UTC"), "2024-05-06T12:00:00+00:00"),
    (NOON.replace(tzinfo=UTC), pa.timestamp("us", tz="Europe/Berlin"), "2024-05-06T14:00:00+02:00"),
    (NOON.replace(tzinfo=UTC), pa.timestamp("us", tz="-03:30"), "2024-05-06T08:30:00-03:30"),
    (time(1, 2, 3, 500000), pa.time64("us"), "01:02:03.500000"),
    (time(1, 2, 3), pa.time32("s"), "01:02:03"),
    (timedelta(days=1, microseconds=500000), pa.duration("us"), "PT86400.5S"),
    (timedelta(seconds=-5), pa.duration("s"), "-PT5S"),
    (pa.MonthDayNano([1, 2, 3_500_000_000]), pa.month_day_nano_interval(), "P1M2DT3.5S"),
    ([1, None, 2], pa.list_(pa.int64()), [1, None, 2]),
    ([0.5, 0.1], pa.list_(pa.float32(), 2), [0.5, 0.1]),
    ([NOON], pa.large_list(pa.timestamp("ns")), ["2024-05-06T12:00:00"]),
    ([[b"a"], None], pa.list_view(pa.list_(pa.binary())), [["YQ=="], None]),
    ({"a": 1, "b": date(2024, 1, 1)}, pa.struct([("a", pa.int8()), ("b", pa.date32())]), {"a": 1, "b": "2024-01-01"}),
    ([("k", Decimal("1.0"))], pa.map_(pa.string(), pa.decimal128(5, 1)), {"k": "1.0"}),
    ([(1, "one")], pa.map_(pa.int64(), pa.string()), [{"key": 1, "value": "one"}]),
    (UUID(int=1).bytes, pa.uuid(), "00000000-0000-0000-0000-000000000001"),
    ('{"a": 1}', pa.json_(), '{"a": 1}'),
]


def rows(dataset: Any, **options: Any) -> list[Row]:
    return list(open_source(dataset, **options))


def inputs(dataset: Any, **options: Any) -> list[Mapping[str, Any]]:
    return [row.input for row in rows(dataset, **options)]


def refusal(dataset: Any, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        rows(dataset, **options)
    return str(caught.value)


def parquet(folder: Path, columns: Any, name: str = "r.parquet", **options: Any) -> Path:
    path = folder / name
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def column(value: Any, kind: pa.DataType) -> pa.Table:
    """A table whose one column holds a null, the value, and a null in a slice of its own."""
    if isinstance(kind, pa.UuidType):
        array: pa.Array = pa.ExtensionArray.from_storage(kind, pa.array([None, value, None], kind.storage_type))
    else:
        array = pa.array([None, value, None], kind)
    return pa.table({"id": [0, 1, 2], "v": array})


# Types


@pytest.mark.parametrize(("value", "kind", "form"), FORMS, ids=[str(k) for _, k, _ in FORMS])
def test_each_type_has_one_form_and_null_stays_null(value: Any, kind: pa.DataType, form: Any) -> None:
    assert [r["v"] for r in inputs(column(value, kind))] == [None, form, None]


def test_run_end_encoded_values_are_spelled_out() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"]))

    assert [r["v"] for r in inputs(pa.table({"v": runs}))] == ["a", "a", "b"]


def test_slices_of_nested_columns_keep_their_own_values() -> None:
    table = column([("k", 1)], pa.map_(pa.string(), pa.int64()))

    assert [r["v"] for r in inputs(table.slice(1))] == [{"k": 1}, None]


def test_empty_prompt_parts_stand_for_nulls_of_every_type(tmp_path: Path) -> None:
    """Never nan, None or NaT."""
    kinds = [pa.float64(), pa.string(), pa.timestamp("ns"), pa.list_(pa.int8()), pa.decimal128(5, 2), pa.int64()]
    table = pa.table({f"c{i}": pa.array([None], kind) for i, kind in enumerate(kinds)})
    template = "[" + "".join(f"{{{{ c{i} }}}}" for i in range(len(kinds))) + "]"
    (row,) = rows(parquet(tmp_path, table))

    assert compile_prompt(template, columns=row.input).render(row).messages[0]["content"] == "[]"


def test_nul_in_text_is_mended_and_noted_on_its_row_alone() -> None:
    first, second = rows(pa.table({"v": ["a\0b", "c"]}))

    assert (first.input["v"], first.sanitized) == ("a\ufffdb", True)
    assert (second.input["v"], second.sanitized) == ("c", False)


def test_text_that_is_no_utf8_is_a_bad_row(tmp_path: Path) -> None:
    raw = pa.array([b"ok", b"\xff"], pa.binary())
    broken = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    path = parquet(tmp_path, {"v": broken})

    assert refusal(path) == (
        f"{path} row group 0 row 2: column 'v': byte 0xff at offset 0 of its text is not UTF-8. "
        "Mend it, or leave such rows out with --skip-bad-rows"
    )
    assert inputs(path, skip_bad_rows=True) == [{"v": "ok"}]


@pytest.mark.parametrize(
    ("value", "kind", "reason"),
    [
        (float("inf"), pa.float32(), "infinity cannot be written as JSON"),
        (4_000_000, pa.date32(), "a date or time beyond the years 1 to 9999"),
        (2**62, pa.timestamp("s"), "a date or time beyond the years 1 to 9999"),
    ],
)
def test_value_without_a_form_is_a_bad_row(value: Any, kind: pa.DataType, reason: str) -> None:
    assert f"row 2: column 'v': {reason}." in refusal(column(value, kind))


def test_column_that_is_there_twice_is_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])

    assert refusal(table) == "the Table names 'a' more than once; rename one of them"


def test_unknown_time_zone_names_the_column() -> None:
    table = pa.table({"at": pa.array([1], pa.timestamp("s", tz="Mars/Olympus"))})

    assert "column 'at' of type timestamp[s, tz=Mars/Olympus] cannot be read: " in refusal(table)
    assert "time zone 'Mars/Olympus' is not known here" in refusal(table)


# Parquet


def test_parquet_rows_carry_their_number_and_source(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"a": [1, None]}, row_group_size=1)

    assert rows(path) == [
        Row(index=0, input={"a": 1}, source="r.parquet", line=1),
        Row(index=1, input={"a": None}, source="r.parquet", line=2),
    ]


def test_bad_row_of_parquet_is_named_with_its_row_group(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"a": [1.0, 2.0, float("inf")]}, row_group_size=2)

    assert refusal(path).startswith(f"{path} row group 1 row 3: column 'a': infinity")


def test_template_error_names_file_row_and_columns(tmp_path: Path) -> None:
    (row,) = rows(parquet(tmp_path, {"text": ["a"]}))
    with pytest.raises(Exception, match=r"row 0 \(r.parquet line 1\).*columns here: text"):
        compile_prompt("{{ tex }}", columns=row.input).render(row)


def test_damaged_column_is_named_with_its_row_group(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"a": [1, 2], "b": ["x" * 50, "y" * 50]}, row_group_size=1, compression="snappy")
    at = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    start = at.dictionary_page_offset or at.data_page_offset
    data[start : start + at.total_compressed_size] = b"\xff" * at.total_compressed_size
    path.write_bytes(data)

    message = refusal(path)

    assert message.startswith(f"{path} row group 1, column 'b', cannot be read: ")
    assert message.endswith("the file is damaged, so fetch or write it again")


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all, but text", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_what_is_no_parquet_says_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.parquet"
    path.write_bytes(data)

    assert f"{path} is not a Parquet file, or cut short: " in refusal(path)


def test_file_cut_short_is_refused_before_any_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"a": list(range(1000))}, row_group_size=10)
    path.write_bytes(path.read_bytes()[:-100])

    assert "cut short" in refusal(path)


def test_file_that_vanished_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"a": [1]})
    source = open_source(path)
    path.unlink()

    with pytest.raises(SourceError, match=r"r\.parquet cannot be read: No such file"):
        list(source)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_packed_parquet_is_read(tmp_path: Path, packed: str) -> None:
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packed]
    path = tmp_path / f"r.parquet{packed}"
    path.write_bytes(pack(parquet(tmp_path, {"a": [1]}).read_bytes()))

    assert inputs(path) == [{"a": 1}]


def test_packed_parquet_that_is_cut_short_says_so(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet.gz"
    path.write_bytes(gzip.compress(parquet(tmp_path, {"a": [1]}).read_bytes())[:-10])

    assert refusal(path) == f"{path} is cut short: its gzip data ends too early; fetch it again"


def test_parquet_under_a_text_suffix_names_the_right_one(tmp_path: Path) -> None:
    assert "is a Parquet file, not text; name it .parquet" in refusal(parquet(tmp_path, {"a": [1]}, "r.csv"))


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path, {"a": [1]})
    monkeypatch.delitem(sys.modules, "batchmill_producers.source_parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigurationError, match=r"Parquet needs .*: pip install 'batchmill\[parquet\]'"):
        rows(path)


@pytest.mark.parametrize("row_group_size", [2_000, 1_000_000])
def test_parquet_is_read_in_flat_memory(tmp_path: Path, row_group_size: int) -> None:
    """Both Python's memory and Arrow's, whatever the size of a row group: 30 MB of rows, 4 MB at once."""
    path = tmp_path / "r.parquet"
    texts = pa.array([f"{i:06d}" + "x" * 1000 for i in range(30_000)])
    pq.write_table(
        pa.table({"t": texts}), path, row_group_size=row_group_size, compression="none", use_dictionary=False
    )
    del texts
    pool = pa.default_memory_pool()
    base, most = pool.bytes_allocated(), 0
    tracemalloc.start()
    for row in open_source(path):
        if row.index % 500 == 0:
            most = max(most, pool.bytes_allocated() - base)
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert row.index == 29_999
    assert most < 8_000_000
    assert python_peak < 8_000_000


# Arrow


def arrow_file(folder: Path, table: pa.Table, *, name: str = "r.arrow", stream: bool = False) -> Path:
    path = folder / name
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_arrow_files_and_streams_are_read_plain_and_compressed(tmp_path: Path, stream: bool, packed: str) -> None:
    table = pa.table({"a": [1, 2, 3], "b": pa.array(["x", None, "x"]).dictionary_encode()})
    path = arrow_file(tmp_path, table, stream=stream)
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packed]
    path.with_name(f"p.arrow{packed}").write_bytes(pack(path.read_bytes()))

    found = rows(tmp_path / f"p.arrow{packed}")

    assert [r.input for r in found] == [{"a": 1, "b": "x"}, {"a": 2, "b": None}, {"a": 3, "b": "x"}]
    assert [r.line for r in found] == [1, 2, 3]


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_is_read(tmp_path: Path, compression: str) -> None:
    feather.write_feather(pa.table({"a": [1]}), tmp_path / "r.feather", compression=compression)

    assert inputs(tmp_path / "r.feather") == [{"a": 1}]


def test_feather_1_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "r.feather").write_bytes(b"FEA1" + b"\0" * 20)

    assert "is Feather version 1; write it again as version 2" in refusal(tmp_path / "r.feather")


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_arrow_file_without_its_footer_is_cut_short(tmp_path: Path, packed: str) -> None:
    """Each batch is whole, so a reader of the stream inside would take it for complete."""
    whole = arrow_file(tmp_path, pa.table({"a": [1, 2, 3, 4]})).read_bytes()
    path = tmp_path / f"p.arrow{packed}"
    cut = whole[: whole.rindex(b"\xff\xff\xff\xff\0\0\0\0") + 8]
    path.write_bytes(gzip.compress(cut) if packed else cut)

    assert refusal(path) == f"{path} is cut short: its Arrow footer is missing; fetch or write it again"


def test_arrow_stream_cut_inside_a_batch_names_the_batch(tmp_path: Path) -> None:
    path = arrow_file(tmp_path, pa.table({"a": list(range(10))}), name="r.arrows", stream=True)
    path.write_bytes(path.read_bytes()[:-20])

    assert refusal(path).startswith(f"{path} record batch 4 cannot be read: ")


def test_arrow_offsets_that_point_nowhere_are_refused(tmp_path: Path) -> None:
    """They would end the process, not raise."""
    path = arrow_file(tmp_path, pa.table({"a": ["aaaa", "bbbb"]}))
    data = path.read_bytes()
    offset = data.index(b"aaaabbbb") - 12
    assert data[offset : offset + 4] == b"\4\0\0\0"
    path.write_bytes(data[:offset] + b"\xff\xff\xff\x7f" + data[offset + 4 :])

    assert "record batch 0 is damaged: " in refusal(path)


@pytest.mark.parametrize("data", [b"", b"text", b"\0" * 100, b"ARROW1\0\0" + b"\xff" * 50 + b"ARROW1"])
def test_what_is_no_arrow_says_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "r.arrow"
    path.write_bytes(data)

    assert f"{path} is not Arrow data, or damaged: " in refusal(path)


# Damage of any kind


def every_type() -> pa.Table:
    columns = {str(kind): column(value, kind).column("v") for value, kind, _ in FORMS}
    unwritable = ("month_day_nano_interval", "list_view", "string_view", "extension")
    return pa.table({name: c for name, c in columns.items() if not any(word in name for word in unwritable)})


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_damage_anywhere_is_refused_or_not_seen_but_never_ends_the_process(tmp_path: Path, suffix: str) -> None:
    path = parquet(tmp_path, every_type()) if suffix == "parquet" else arrow_file(tmp_path, every_type())
    whole = path.read_bytes()
    dice = random.Random(7)
    refused = 0
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(dice.choice([1, 3, 10])):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
        try:
            rows(path, skip_bad_rows=True)
        except SourceError:
            refused += 1

    assert refused > 40


def test_page_that_does_not_fit_its_checksum_is_refused(tmp_path: Path) -> None:
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = parquet(tmp_path, {"a": ["some text"]}, **plain, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"some text", b"Some text", 1))

    assert "row group 0, column 'a', cannot be read: " in refusal(path)


# Data frames


def test_table_and_its_batches_give_rows() -> None:
    table = pa.table({"a": [1, None]})

    assert inputs(table) == inputs(table.to_batches()[0]) == [{"a": 1}, {"a": None}]
    assert [(r.source, r.line) for r in rows(table)] == [(None, None), (None, None)]


def test_reader_is_read_only_once() -> None:
    source = open_source(pa.table({"a": [1]}).to_reader())
    list(source)

    with pytest.raises(SourceError, match="can be read only once"):
        list(source)


class OnlyAStream:
    """What duckdb, ibis and others hand over."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_anything_with_an_arrow_stream_gives_rows_again_and_again() -> None:
    source = open_source(OnlyAStream(pa.table({"a": ["x"]})))

    assert [r.input for r in source] == [r.input for r in source] == [{"a": "x"}]


def test_arrow_stream_that_is_no_table_says_so() -> None:
    assert "cannot be read as a table" in refusal(pl.Series("a", [1]))


def test_lazy_frame_says_collect() -> None:
    assert "give what its .collect() answers" in refusal(pl.DataFrame({"a": [1]}).lazy())


def test_pandas_frame_gives_values_not_nan_none_or_nat() -> None:
    frame = pd.DataFrame(
        {
            "t": ["x", None],
            "f": [0.5, float("nan")],
            "s": np.array([0.1, np.nan], "float32"),
            "i": pd.array([1, None], "Int64"),
            "at": pd.to_datetime(["2024-01-02 03:04:05.000000001", None]),
            "took": pd.to_timedelta([1_500_000_001, None]),
            "c": pd.Categorical(["u", None]),
            "o": [{"k": Decimal("1.50")}, b"\xff"],
            "l": [np.array(["a", None], object), np.array([0.1], "float32")],
        }
    )

    assert inputs(frame) == [
        {
            "t": "x",
            "f": 0.5,
            "s": 0.1,
            "i": 1,
            "at": "2024-01-02T03:04:05.000000001",
            "took": "PT1.500000001S",
            "c": "u",
            "o": {"k": "1.50"},
            "l": ["a", None],
        },
        dict.fromkeys(("t", "f", "s", "i", "at", "took", "c")) | {"o": "/w==", "l": [0.1]},
    ]


def test_pandas_frame_with_a_column_twice_is_refused() -> None:
    assert "the data frame names 'a' more than once" in refusal(pd.DataFrame([[1, 2]], columns=["a", "a"]))


def test_polars_frame_gives_exact_values() -> None:
    frame = pl.DataFrame(
        {
            "at": pl.Series([1, None]).cast(pl.Datetime("ns")),
            "d": pl.Series(["1.50", None]).cast(pl.Decimal(10, 2)),
            "c": pl.Series(["x", None], dtype=pl.Categorical),
            "l": [[1], None],
            "s": [{"k": "v"}, {"k": None}],
            "f": pl.Series([0.1, float("nan")], dtype=pl.Float32),
        }
    )

    assert inputs(frame) == [
        {"at": "1970-01-01T00:00:00.000000001", "d": "1.50", "c": "x", "l": [1], "s": {"k": "v"}, "f": 0.1},
        {"at": None, "d": None, "c": None, "l": None, "s": {"k": None}, "f": None},
    ]


def test_polars_objects_are_their_values_not_their_addresses() -> None:
    assert inputs(pl.DataFrame({"o": pl.Series([Decimal("2.0"), b"a"], dtype=pl.Object)})) == [
        {"o": "2.0"},
        {"o": "YQ=="},
    ]


@pytest.mark.parametrize("library", ["pyarrow", "polars", "pandas"])
def test_frames_are_read_in_flat_memory(library: str) -> None:
    table = pa.table({"t": [f"{i:06d}" + "x" * 500 for i in range(30_000)]})
    frame = {"pyarrow": lambda: table, "polars": lambda: pl.from_arrow(table), "pandas": table.to_pandas}[library]()
    tracemalloc.start()
    count = sum(1 for _ in open_source(frame))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 30_000
    assert peak < 4_000_000


def test_iterable_that_fails_half_way_names_how_far_it_came() -> None:
    def failing() -> Iterator[dict[str, int]]:
        yield {"a": 1}
        yield {"a": 2}
        raise KeyError("gone")

    assert refusal(failing()) == (
        "the data set failed after 2 rows: KeyError: 'gone'; mend what yields the rows and submit again"
    )


COLUMNS = st.sampled_from(
    [
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
        (pa.float32(), st.floats(allow_nan=False, allow_infinity=False, width=32)),
        (pa.string(), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))),
        (pa.list_(pa.bool_()), st.lists(st.one_of(st.none(), st.booleans()))),
        (pa.timestamp("us"), st.datetimes()),
        (pa.decimal128(20, 3), st.decimals(-(10**15), 10**15, places=3)),
        (pa.binary(), st.binary()),
    ]
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_a_table_holds_can_be_told_from_its_rows(data: st.DataObject) -> None:
    """Round trip of every type: table -> rows as they are stored -> table."""
    kind, values = data.draw(COLUMNS)
    column = pa.array(data.draw(st.lists(st.one_of(st.none(), values), min_size=1, max_size=20)), kind)

    stored = [json.loads(encode_input(r))["input"]["v"] for r in open_source(pa.table({"v": column}))]

    assert pa.array([_back(v, kind) for v in stored], kind).equals(column)


def _back(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_decimal(kind):
        return Decimal(value)
    if pa.types.is_timestamp(kind):
        return datetime.fromisoformat(value)
    if pa.types.is_binary(kind):
        import base64

        return base64.b64decode(value)
    return value
