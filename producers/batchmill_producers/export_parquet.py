"""Results as Parquet with typed columns, written a row group at a time.

A file has one type per column, so the inputs are read twice: once to see which type each of their columns has over the
whole job, and once to write them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from batchmill_core.errors import ConfigurationError
from batchmill_core.payload import decode_frame, split_input
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import TOKEN_KINDS
from batchmill_db import jobs, payload_store, rounds
from batchmill_db.session import Database

from .column_types import ColumnTypes, JsonType, as_json
from .export_columns import there_are, without_clashes
from .export_rows import Result, loads_input, stream_results

_GROUP_ROWS = 20_000
_GROUP_BYTES = 16_000_000
_USD = pa.decimal128(18, 9)
_TYPES = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    JsonType.JSON: pa.string(),
    JsonType.BIG: pa.uint64(),
}
_Cell = Callable[[Result, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One column of the file and how its value is told from a result and its input."""

    field: pa.Field
    cell: _Cell


def write_parquet(
    database: Database,
    job_id: int,
    out: BinaryIO,
    *,
    statuses: Iterable[RowStatus] | None = None,
    columns: Sequence[str] | None = None,
) -> int:
    """Writes results in row order; answers how many.

    Money is decimal128(18, 9), embeddings are lists of float32, usage and error are one column per part. A column of the
    input whose values are all of one type has it, any other holds JSON text and says so in its field's metadata
    (``batchmill: json``). ``columns`` picks columns by their names in the file. Raises ConfigurationError for others.
    """
    types, end_row = _input_types(database, job_id)
    wanted = _picked(_all_columns(database, job_id, types), columns)
    schema = pa.schema([c.field for c in wanted])
    # Rows that are loaded meanwhile have types that nobody saw.
    found = itertools.takewhile(lambda r: r.row < end_row, stream_results(database, job_id, statuses=statuses))
    count = 0
    with pq.ParquetWriter(pa.PythonFile(out, mode="w"), schema, compression="zstd") as writer:
        for group in _groups(found):
            writer.write_batch(_batch(group, wanted, schema))
            count += len(group)
    return count


def _all_columns(database: Database, job_id: int, types: Mapping[str, type | JsonType]) -> list[_Column]:
    with database.reading() as conn:
        task = rounds.spec_of(conn, job_id, jobs.get(conn, job_id).round).task
    own = _result_columns(task)
    names = without_clashes(types, [c.field.name for c in own])
    return own + [_input_column(given, name, types[given]) for given, name in zip(types, names, strict=True)]


def _picked(columns: Sequence[_Column], names: Sequence[str] | None) -> list[_Column]:
    if names is None:
        return list(columns)
    known = {c.field.name: c for c in columns}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ConfigurationError(f"there is no column {unknown[0]!r} in Parquet; {there_are(unknown[0], [*known])}")
    return [known[n] for n in names]


def _result_columns(task: TaskKind) -> list[_Column]:
    is_vector = task is TaskKind.EMBED
    plain = [
        ("row", pa.int64()),
        ("custom_id", pa.string()),
        ("status", pa.string()),
        ("output", pa.list_(pa.float32()) if is_vector else pa.string()),
        ("finish_reason", pa.string()),
        ("model", pa.string()),
        ("account", pa.string()),
        ("calls", pa.int64()),
        ("cached", pa.bool_()),
        ("latency_ms", pa.int64()),
        ("ttft_ms", pa.int64()),
        ("inter_token_ms", pa.float64()),
        ("sanitized", pa.bool_()),
        ("source", pa.string()),
        ("line", pa.int64()),
    ]
    columns = {name: _column(name, kind, _attribute(name)) for name, kind in plain}
    columns["output"] = _column("output", columns["output"].field.type, _vector if is_vector else _text)
    return [
        *(columns.pop(name) for name in ("row", "custom_id", "status", "output")),
        *(_column(f"error_{part}", pa.string(), _part("error", part)) for part in ("kind", "message")),
        *(columns.pop(name) for name in ("finish_reason", "model", "account")),
        *(_column(f"{kind}_tokens", pa.int64(), _part("usage", kind)) for kind in TOKEN_KINDS),
        *(_column(name, _USD, _money(name)) for name in ("cost_usd", "unknown_usd")),
        *columns.values(),
    ]


def _column(name: str, kind: pa.DataType, cell: _Cell, *, is_json: bool = False) -> _Column:
    return _Column(field=pa.field(name, kind, metadata={"batchmill": "json"} if is_json else None), cell=cell)


def _attribute(name: str) -> _Cell:
    return lambda r, _: getattr(r, name)


def _part(name: str, part: str) -> _Cell:
    return lambda r, _: None if getattr(r, name) is None else getattr(r, name)[part]


def _money(name: str) -> _Cell:
    return lambda r, _: None if getattr(r, name) is None else Decimal(getattr(r, name))


def _vector(r: Result, _: Mapping[str, Any]) -> Any:
    return r.output if isinstance(r.output, list) else None


def _text(r: Result, _: Mapping[str, Any]) -> Any:
    return r.output if r.output is None or isinstance(r.output, str) else orjson.dumps(r.output).decode()


def _input_column(given: str, name: str, kind: type | JsonType) -> _Column:
    def json_cell(_: Result, row: Mapping[str, Any]) -> Any:
        return as_json(row[given]) if row.get(given) is not None else None

    def plain_cell(_: Result, row: Mapping[str, Any]) -> Any:
        return row.get(given)

    is_json = kind is JsonType.JSON
    return _column(name, _TYPES[kind], json_cell if is_json else plain_cell, is_json=is_json)


def _input_types(database: Database, job_id: int) -> tuple[Mapping[str, type | JsonType], int]:
    """The type of each column over all rows of the job, in the order in which columns appear; and the row they end at."""
    types, next_row = ColumnTypes(), 0
    while True:
        with database.reading() as conn:
            found = payload_store.inputs_after(conn, job_id, next_row)
        if found is None:
            return types.found(), next_row
        first, n_rows, frame = found
        for line in decode_frame(frame):
            types.see(loads_input(split_input(line)[1]))
        next_row = first + n_rows


def _groups(found: Iterator[Result]) -> Iterator[list[Result]]:
    """Rows that make one row group: many, but few enough to be held at once."""
    group: list[Result] = []
    held = 0
    for r in found:
        group.append(r)
        held += len(r.raw_input) + _output_bytes(r.output)
        if len(group) >= _GROUP_ROWS or held >= _GROUP_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _output_bytes(output: Any) -> int:
    return 24 * len(output) if isinstance(output, list) else len(output) if isinstance(output, str) else 100


def _batch(group: Sequence[Result], columns: Sequence[_Column], schema: pa.Schema) -> pa.RecordBatch:
    inputs = [r.input for r in group]
    arrays = [pa.array([c.cell(r, row) for r, row in zip(group, inputs, strict=True)], c.field.type) for c in columns]
    return pa.record_batch(arrays, schema=schema)
