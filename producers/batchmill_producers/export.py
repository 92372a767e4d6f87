"""Results in row order, streamed: as values, as JSON lines, as CSV, as OpenAI batch output."""

from __future__ import annotations

import csv
import io
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from batchmill_core.errors import ConfigurationError
from batchmill_core.job import JobState
from batchmill_core.payload import RowOrigin, decode_frame, split_input
from batchmill_core.request import RowStatus
from batchmill_core.usage import TOKEN_KINDS, usd
from batchmill_db import chunks, jobs, results
from batchmill_db.session import Database

FORMATS = ("jsonl", "csv", "openai")
COLUMNS = (
    "row",
    "custom_id",
    "status",
    "output",
    "error",
    "finish_reason",
    "model",
    "account",
    "usage",
    "cost_usd",
    "unknown_usd",
    "calls",
    "cached",
    "latency_ms",
    "ttft_ms",
    "sanitized",
    "source",
    "line",
    "input",
)
_FLUSH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row's result. ``input`` is the row as its source gave it; ``output`` is text, JSON under a schema, or floats.

    ``cost_usd`` is the settled sum of all the row's calls of its round and ``usage`` the tokens of those calls; unknown is
    None, never 0.
    """

    row: int
    custom_id: str | None
    status: RowStatus | None
    output: Any
    error: Mapping[str, str] | None
    finish_reason: str | None
    model: str | None
    account: str | None
    usage: Mapping[str, int] | None
    cost_usd: str | None
    unknown_usd: str | None
    calls: int
    cached: bool
    latency_ms: int | None
    ttft_ms: int | None
    sanitized: bool
    source: str | None
    line: int | None
    raw_input: bytes

    @property
    def input(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.raw_input)
        return found

    def as_dict(self) -> dict[str, Any]:
        """The result under the names, and in the order, of a JSON line."""
        return {c: getattr(self, c) for c in COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What all rows of one export share."""

    job_id: int
    structured: bool
    cancelled: bool
    dead: Mapping[int, str]
    statuses: frozenset[RowStatus] | None


def stream_results(database: Database, job_id: int, *, statuses: Iterable[RowStatus] | None = None) -> Iterator[Result]:
    """Results in row order, one payload in memory at a time; rows that have no result yet have no line.

    Rows of a cancelled job that got no answer are ``cancelled``, rows that brought workers down ``dead``.
    """
    with database.reading() as conn:
        job = jobs.get(conn, job_id)
        view = _View(
            job_id=job_id,
            structured=jobs.spec_of(conn, job_id, job.round).schema is not None,
            cancelled=job.state is JobState.CANCELLED,
            dead=chunks.dead_rows(conn, job_id),
            statuses=None if statuses is None else frozenset(statuses),
        )
    next_row = 0
    while True:
        with database.reading() as conn:
            found = jobs.inputs_after(conn, job_id, next_row)
            if found is None:
                return
            first, n_rows, frame = found
            saved = results.between(conn, job_id, first, first + n_rows - 1)
        yield from _of_payload(view, first, decode_frame(frame), saved)
        next_row = first + n_rows


def _of_payload(view: _View, first: int, lines: Sequence[bytes], saved: Sequence[Any]) -> Iterator[Result]:
    by_row = {r.row: r for r in saved}
    for offset, line in enumerate(lines):
        row = first + offset
        record = by_row.get(row)
        status = _status(view, row, record)
        if status is None or (view.statuses is not None and status not in view.statuses):
            continue
        origin, raw = split_input(line)
        yield (
            _unanswered(view, row, status, origin, raw)
            if record is None
            else _result(view, record, status, origin, raw)
        )


def _status(view: _View, row: int, record: Any) -> RowStatus | None:
    if record is not None:
        return RowStatus(record.status)
    if row in view.dead:
        return RowStatus.DEAD
    return RowStatus.CANCELLED if view.cancelled else None


def _result(view: _View, r: Any, status: RowStatus, origin: RowOrigin, raw: bytes) -> Result:
    return Result(
        row=r.row,
        custom_id=origin.custom_id,
        status=status,
        output=_output(view, r, status),
        error=None if r.error_kind is None else {"kind": r.error_kind, "message": r.error or ""},
        finish_reason=r.finish_reason,
        model=r.model,
        account=r.account,
        usage=None if r.input_tokens is None else {k: getattr(r, f"{k}_tokens") or 0 for k in TOKEN_KINDS},
        cost_usd=usd(r.cost_nanousd),
        unknown_usd=usd(r.unknown_nanousd),
        calls=r.calls,
        cached=bool(r.cached),
        latency_ms=r.latency_ms,
        ttft_ms=r.ttft_ms,
        sanitized=bool(r.sanitized) or origin.sanitized,
        source=origin.source,
        line=origin.line,
        raw_input=raw,
    )


def _output(view: _View, r: Any, status: RowStatus) -> Any:
    if r.embedding is not None:
        return list(struct.unpack(f"<{len(r.embedding) // 4}f", r.embedding))
    if r.output is None and r.raw is not None and status is RowStatus.INVALID:
        return r.raw  # the last answer as it came
    if view.structured and status is RowStatus.OK and r.output is not None:
        try:
            return orjson.loads(r.output)
        except orjson.JSONDecodeError:
            return r.output
    return r.output


def _unanswered(view: _View, row: int, status: RowStatus, origin: RowOrigin, raw: bytes) -> Result:
    error = {"kind": "crashed", "message": view.dead[row]} if row in view.dead else None
    return Result(
        row=row,
        custom_id=origin.custom_id,
        status=status,
        output=None,
        error=error,
        finish_reason=None,
        model=None,
        account=None,
        usage=None,
        cost_usd=None,
        unknown_usd=None,
        calls=0,
        cached=False,
        latency_ms=None,
        ttft_ms=None,
        sanitized=origin.sanitized,
        source=origin.source,
        line=origin.line,
        raw_input=raw,
    )


def write_results(
    database: Database,
    job_id: int,
    out: BinaryIO,
    *,
    format: str = "jsonl",
    statuses: Iterable[RowStatus] | None = None,
    columns: Sequence[str] | None = None,
) -> int:
    """Writes results as ``jsonl``, ``csv`` or ``openai`` (batch output lines); answers how many rows were written.

    ``columns`` picks result columns and columns of the input by name. Raises ConfigurationError for an unknown format.
    """
    found = stream_results(database, job_id, statuses=statuses)
    if format == "jsonl":
        lines = _json_lines(found, columns)
    elif format == "openai":
        lines = (_openai_line(r) for r in found)
    elif format == "csv":
        lines = _csv_lines(found, columns)
    else:
        raise ConfigurationError(f"format {format!r} is not known; there are {', '.join(FORMATS)}")
    return _write(out, lines) - (1 if format == "csv" else 0)


def _write(out: BinaryIO, lines: Iterable[bytes]) -> int:
    """Writes in large pieces; answers the number of lines."""
    count, held, size = 0, [], 0
    for line in lines:
        held.append(line)
        count += 1
        size += len(line)
        if size >= _FLUSH_BYTES:
            out.write(b"".join(held))
            held, size = [], 0
    out.write(b"".join(held))
    return count


_PLAIN = tuple(c for c in COLUMNS if c != "input")


def _json_lines(found: Iterable[Result], columns: Sequence[str] | None) -> Iterator[bytes]:
    if columns is not None:
        for r in found:
            yield orjson.dumps(_picked(r, columns), option=orjson.OPT_APPEND_NEWLINE)
        return
    for r in found:
        head = orjson.dumps({c: getattr(r, c) for c in _PLAIN})
        yield b'%b,"input":%b}\n' % (head[:-1], r.raw_input)


def _picked(r: Result, columns: Sequence[str]) -> dict[str, Any]:
    given = r.input if any(c not in COLUMNS for c in columns) else {}
    missing = [c for c in columns if c not in COLUMNS and c not in given]
    if missing:
        raise ConfigurationError(
            f"row {r.row} has no column {missing[0]!r}; there are {', '.join(COLUMNS)} and of the input {', '.join(given)}"
        )
    return {c: getattr(r, c) if c in COLUMNS else given[c] for c in columns}


_CSV_COLUMNS = tuple(c for c in COLUMNS if c not in ("input", "usage")) + tuple(f"{k}_tokens" for k in TOKEN_KINDS)


def _csv_lines(found: Iterator[Result], columns: Sequence[str] | None) -> Iterator[bytes]:
    """A header, then a line per row: result columns, then the input's columns as the first row has them."""
    first = next(found, None)
    given = () if first is None else tuple(first.input)
    names = tuple(columns) if columns is not None else (*_CSV_COLUMNS, *given)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # A column of the input that is called like one of ours keeps its place under a name of its own.
    writer.writerow(
        n if columns is not None or i < len(_CSV_COLUMNS) or n not in _CSV_COLUMNS else f"input.{n}"
        for i, n in enumerate(names)
    )
    yield text.getvalue().encode()
    if first is None:
        return
    for r in itertools.chain([first], found):
        text.seek(0)
        text.truncate()
        writer.writerow(_csv_cells(r, names, split=0 if columns is not None else len(_CSV_COLUMNS)))
        yield text.getvalue().encode()


def _csv_cells(r: Result, names: Sequence[str], *, split: int) -> Iterator[str]:
    """Cells of one row; with ``split`` the names from there on are of the input, whatever they are called."""
    given = r.input
    for i, name in enumerate(names):
        if split and i >= split:
            yield _cell(given.get(name))
        elif name in COLUMNS:
            yield _cell(getattr(r, name))
        elif name.endswith("_tokens") and name.removesuffix("_tokens") in TOKEN_KINDS and name not in given:
            yield _cell(None if r.usage is None else r.usage[name.removesuffix("_tokens")])
        elif name in given:
            yield _cell(given[name])
        else:
            raise ConfigurationError(
                f"row {r.row} has no column {name!r}; there are {', '.join(COLUMNS)} and of the input {', '.join(given)}"
            )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return orjson.dumps(value).decode()


def _openai_line(r: Result) -> bytes:
    """One line as the OpenAI Batch API writes them (https://platform.openai.com/docs/api-reference/batch)."""
    answered = r.error is None and r.status not in (RowStatus.DEAD, RowStatus.CANCELLED, None)
    line: dict[str, Any] = {
        "id": f"batch_req_{r.row}",
        "custom_id": r.custom_id if r.custom_id is not None else f"row-{r.row}",
        "response": None,
        "error": None,
    }
    if answered:
        line["response"] = {"status_code": 200, "request_id": f"row-{r.row}", "body": _openai_body(r)}
    else:
        error = r.error or {"kind": str(r.status), "message": f"the row ended {r.status}"}
        line["error"] = {"code": error["kind"], "message": error["message"]}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _openai_body(r: Result) -> dict[str, Any]:
    usage = None
    if r.usage is not None:
        usage = {
            "prompt_tokens": r.usage["input"],
            "completion_tokens": r.usage["output"],
            "total_tokens": r.usage["input"] + r.usage["output"],
            "prompt_tokens_details": {"cached_tokens": r.usage["cached_input"]},
            "completion_tokens_details": {"reasoning_tokens": r.usage["reasoning"]},
        }
    if isinstance(r.output, list) and all(isinstance(x, float) for x in r.output):
        data = [{"object": "embedding", "index": 0, "embedding": r.output}]
        return {"object": "list", "model": r.model, "data": data, "usage": usage}
    refused = r.status is RowStatus.REFUSED
    text = r.output if r.output is None or isinstance(r.output, str) else orjson.dumps(r.output).decode()
    message = {"role": "assistant", "content": None if refused else text, "refusal": text if refused else None}
    choice = {"index": 0, "message": message, "finish_reason": r.finish_reason or "stop"}
    return {"object": "chat.completion", "model": r.model, "choices": [choice], "usage": usage}
