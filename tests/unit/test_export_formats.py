"""Exports: what CSV and Parquet hold, with which types, and that they give back what was put in."""

from __future__ import annotations

import csv
import io
import json
import struct
import tempfile
import tracemalloc
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import insert

from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus, TaskKind
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import result
from batchmill_db.session import Database
from batchmill_producers.column_types import ColumnTypes, JsonType
from batchmill_producers.export import FORMATS, write_results
from batchmill_producers.export_parquet import write_parquet
from batchmill_producers.submit import Submission, submit
from tests.mill import MODEL, catalog_for, new_database, settings_for

ANSWER = {
    "round": 1,
    "status": "ok",
    "output": "positive",
    "finish_reason": "stop",
    "model": MODEL,
    "account": "acme",
    "input_tokens": 80,
    "cached_input_tokens": 5,
    "output_tokens": 2,
    "cost_nanousd": 35_200,
    "calls": 1,
    "latency_ms": 101,
    "chunk_id": 1,
    "fence": 1,
    "saved_ms": 1,
}


class House:
    """A database to submit to, in which rows are answered by hand."""

    def __init__(self, folder: Path) -> None:
        self.database: Database = new_database(folder)
        self.settings = settings_for(folder, catalog_for())

    def answered(self, rows: Any, answers: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> JobRecord:
        """A job of these rows with an answer each; by default all the same one."""
        job = submit(
            self.database, self.settings, Submission(dataset=rows, model=MODEL, **{"prompt": "Label this", **options})
        )
        given = [{}] * job.n_rows if answers is None else answers
        values = [{**ANSWER, **a, "job_id": job.id, "row": n} for n, a in enumerate(given)]
        with self.database.transaction() as conn:
            for value in values:
                conn.execute(insert(result), value)
        return job

    def written(self, job: JobRecord, **options: Any) -> bytes:
        out = io.BytesIO()
        write_results(self.database, job.id, out, **options)
        return out.getvalue()

    def table(self, job: JobRecord, **options: Any) -> pa.Table:
        return pq.read_table(io.BytesIO(self.written(job, format="parquet", **options)))

    def cells(self, job: JobRecord, **options: Any) -> list[list[str]]:
        return list(csv.reader(io.StringIO(self.written(job, format="csv", **options).decode(), newline="")))


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


# Parquet


def test_result_columns_are_typed(house: House) -> None:
    job = house.answered([{"text": "a"}])

    table = house.table(job)

    assert table.drop_columns(["text"]).to_pylist() == [
        {
            "row": 0,
            "custom_id": None,
            "status": "ok",
            "output": "positive",
            "error_kind": None,
            "error_message": None,
            "finish_reason": "stop",
            "model": MODEL,
            "account": "acme",
            "input_tokens": 80,
            "cached_input_tokens": 5,
            "cache_write_tokens": 0,
            "output_tokens": 2,
            "reasoning_tokens": 0,
            "cost_usd": Decimal("0.000035200"),
            "unknown_usd": None,
            "calls": 1,
            "cached": False,
            "latency_ms": 101,
            "ttft_ms": None,
            "inter_token_ms": None,
            "sanitized": False,
            "source": None,
            "line": None,
        }
    ]
    assert table.schema.field("cost_usd").type == pa.decimal128(18, 9)
    assert table.schema.field("row").type == table.schema.field("latency_ms").type == pa.int64()


def test_unknown_usage_and_cost_are_null_not_zero(house: House) -> None:
    job = house.answered(
        [{"text": "a"}], [{"input_tokens": None, "cost_nanousd": None, "error_kind": "timeout", "error": "late"}]
    )

    (row,) = house.table(job).to_pylist()

    assert (row["input_tokens"], row["cost_usd"]) == (None, None)
    assert (row["error_kind"], row["error_message"]) == ("timeout", "late")


def test_embeddings_are_lists_of_float32(house: House) -> None:
    vector = [0.1, -2.5]
    job = house.answered(
        [{"text": "a"}, {"text": "b"}],
        [{"output": None, "embedding": struct.pack("<2f", *vector)}, {"output": None, "status": "failed"}],
        prompt="{{ text }}",
        task=TaskKind.EMBED,
    )

    column = house.table(job).column("output")

    assert column.type == pa.list_(pa.float32())
    assert column.equals(pa.chunked_array([pa.array([vector, None], pa.list_(pa.float32()))]))


def test_input_columns_have_their_type_where_all_values_agree_else_json(house: House) -> None:
    rows = [
        {"i": 1, "f": 0.5, "s": "x", "b": True, "u": 2**64 - 1, "n": None, "mixed": "a", "nested": [1], "big": 2**70},
        {"i": None, "f": 2, "s": None, "b": None, "u": 0, "n": None, "mixed": 1, "nested": {"k": "é"}, "late": "y"},
    ]
    job = house.answered(rows)

    table = house.table(job, columns=["i", "f", "s", "b", "u", "n", "mixed", "nested", "big", "late"])

    assert {f.name: str(f.type) for f in table.schema} == {
        "i": "int64",
        "f": "double",
        "s": "string",
        "b": "bool",
        "u": "uint64",
        "n": "string",
        "mixed": "string",
        "nested": "string",
        "big": "string",
        "late": "string",
    }
    assert [f.name for f in table.schema if f.metadata == {b"batchmill": b"json"}] == ["mixed", "nested", "big"]
    assert table.column("mixed").to_pylist() == ['"a"', "1"]
    assert table.column("nested").to_pylist() == ["[1]", '{"k":"é"}']
    assert table.column("big").to_pylist() == [str(2**70), None]
    assert table.column("late").to_pylist() == [None, "y"]


def test_input_column_that_is_called_like_ours_keeps_its_place_under_another_name(house: House) -> None:
    job = house.answered([{"row": 7, "input.row": 8}])

    (row,) = house.table(job).to_pylist()

    assert (row["row"], row["input.row"], row["input.input.row"]) == (0, 7, 8)


def test_answers_under_a_schema_are_json_text(house: House) -> None:
    job = house.answered([{"text": "a"}], [{"output": '{"a": [1]}'}], schema={"type": "object"})

    assert house.table(job).column("output").to_pylist() == ['{"a":[1]}']


def test_type_of_a_column_is_told_from_all_rows_whatever_is_exported(house: House) -> None:
    job = house.answered([{"v": 1}, {"v": "x"}], [{"status": "failed"}, {}])

    table = house.table(job, statuses=[RowStatus.FAILED])

    assert table.column("v").to_pylist() == ["1"]


def test_no_rows_are_a_file_with_all_columns(house: House) -> None:
    table = house.table(house.answered([{"v": 1}], []))

    assert (table.num_rows, table.schema.field("v").type) == (0, pa.int64())


def test_unknown_column_names_those_there_are(house: House) -> None:
    with pytest.raises(
        ConfigurationError, match=r"there is no column 'x' in Parquet; there are row, custom_id, .*, v$"
    ):
        house.table(house.answered([{"v": 1}]), columns=["x"])


def test_what_it_is_written_to_stays_open(house: House) -> None:
    """Standard output is not ours to close."""
    out = io.BytesIO()

    write_parquet(house.database, house.answered([{"v": 1}]).id, out)

    assert not out.closed


class Unseekable(io.RawIOBase):
    """A pipe, as far as writing goes."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def test_parquet_goes_through_a_pipe(house: House) -> None:
    out = Unseekable()

    write_results(house.database, house.answered([{"v": 1}]).id, out, format="parquet")  # type: ignore[arg-type]

    assert pq.read_table(io.BytesIO(bytes(out.data))).num_rows == 1


def test_parquet_is_written_in_row_groups_and_flat_memory(house: House, tmp_path: Path) -> None:
    """60 MB of input, of which a row group and what it becomes are held."""
    text = "x" * 20_000
    job = house.answered(({"n": n, "text": text} for n in range(3_000)), [{}] * 3_000)
    path = tmp_path / "out.parquet"
    pool = pa.default_memory_pool()
    before = pool.max_memory()
    tracemalloc.start()
    with path.open("wb") as out:
        write_results(house.database, job.id, out, format="parquet")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert pq.ParquetFile(path).num_row_groups >= 3
    assert peak < 60_000_000
    assert pool.max_memory() - before < 60_000_000


VALUES = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    "bool": st.booleans(),
    "list": st.lists(st.integers(0, 9), max_size=3),
}


@settings(max_examples=25, deadline=None)
@given(data=st.data(), kinds=st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=4))
def test_a_frame_that_is_submitted_and_exported_has_the_same_values(data: st.DataObject, kinds: list[str]) -> None:
    n_rows = data.draw(st.integers(1, 5))
    columns = {
        f"{kind}{i}": data.draw(st.lists(st.one_of(st.none(), VALUES[kind]), min_size=n_rows, max_size=n_rows))
        for i, kind in enumerate(kinds)
    }
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        table = house.table(house.answered(frame))
        house.database.close()

    for name, values in columns.items():
        back = table.column(name).to_pylist()
        is_json = table.schema.field(name).metadata is not None
        assert [json.loads(v) if is_json and v is not None else v for v in back] == values


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.one_of(
                st.none(),
                st.booleans(),
                st.integers(),
                st.floats(allow_nan=False, allow_infinity=False),
                st.text(),
                st.just([]),
            ),
        ),
        max_size=5,
    )
)
def test_every_value_fits_the_type_that_was_told(rows: list[dict[str, Any]]) -> None:
    types = ColumnTypes()
    for row in rows:
        types.see(row)

    for name, kind in types.found().items():
        values = [row[name] for row in rows if row.get(name) is not None]
        if kind is JsonType.JSON:
            continue
        if kind is JsonType.BIG:
            assert pa.array(values, pa.uint64()).to_pylist() == values
        elif values and all(c < "\ud800" or c > "\udfff" for v in values if isinstance(v, str) for c in v):
            arrow = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}[kind]
            assert pa.array(values, arrow).to_pylist() == values


# CSV


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_excel_safe_puts_an_apostrophe_before_what_looks_like_a_formula(house: House, start: str) -> None:
    job = house.answered([{"text": f"{start}1+1"}], [{"output": f"{start}cmd"}])

    assert house.cells(job, columns=["text", "output"], excel_safe=True)[1] == [f"'{start}1+1", f"'{start}cmd"]
    assert house.cells(job, columns=["text", "output"])[1] == [f"{start}1+1", f"{start}cmd"]


def test_excel_safe_leaves_numbers_and_other_text_alone_and_mends_the_header(house: House) -> None:
    job = house.answered([{"=h": -5, "b": "a=b", "c": "", "d": [-1]}])

    header, cells = house.cells(job, excel_safe=True)

    assert header[-4:] == ["'=h", "b", "c", "d"]
    assert cells[-4:] == ["-5", "a=b", "", "[-1]"]


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "csv"])
def test_excel_safe_is_for_csv_alone(house: House, format: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--excel-safe is for CSV, and the format is {format}"):
        house.written(house.answered([{"v": 1}]), format=format, excel_safe=True)


def test_csv_keeps_an_input_column_that_is_called_like_ours(house: House) -> None:
    job = house.answered([{"row": 7, "text": "a"}])

    header, cells = house.cells(job)

    assert header[-2:] == ["input.row", "text"]
    assert (cells[0], cells[-2:]) == ("0", ["7", "a"])


def test_integers_of_any_size_survive_every_format(house: House) -> None:
    job = house.answered([{"v": 2**70, "w": [2**70]}])

    assert house.cells(job, columns=["v", "w"])[1] == [str(2**70), f"[{2**70}]"]
    assert json.loads(house.written(job, columns=["v"])) == {"v": 2**70}
    assert json.loads(house.written(job))["input"] == {"v": 2**70, "w": [2**70]}


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(VALUES["text"], min_size=1, max_size=5))
def test_csv_gives_back_every_text(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        house = House(Path(folder))
        found = house.cells(house.answered([{"id": i, "t": t} for i, t in enumerate(texts)]), columns=["id", "t"])
        house.database.close()

    assert [t for _, t in found[1:]] == texts
