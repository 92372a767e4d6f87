"""Results in row order, streamed: as values, as JSON lines, as CSV, as OpenAI batch output."""

from __future__ import annotations

import csv
import io
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
_PLAIN = tuple(c for c in COLUMNS if c != "input")
_STATUS = {s.value: s for s in RowStatus}
_usd = lru_cache(maxsize=4096)(usd)


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
    for fields, raw in _stream(database, job_id, statuses):
        yield Result(**fields, raw_input=raw)


def _stream(
    database: Database, job_id: int, statuses: Iterable[RowStatus] | None
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The fields of each result, in the order of a JSON line, and its input as stored."""
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


def _of_payload(
    view: _View, first: int, lines: Sequence[bytes], saved: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], bytes]]:
    by_row = {r[0]: r for r in saved}
    wanted = view.statuses
    for row, line in enumerate(lines, start=first):
        record = by_row.get(row)
        status = _STATUS[record[2]] if record is not None else _without_result(view, row)
        if status is None or (wanted is not None and status not in wanted):
            continue
        origin, raw = split_input(line)
        yield (_unanswered(view, row, status, origin) if record is None else _fields(view, record, status, origin)), raw


def _without_result(view: _View, row: int) -> RowStatus | None:
    if row in view.dead:
        return RowStatus.DEAD
    return RowStatus.CANCELLED if view.cancelled else None


def _fields(view: _View, record: Sequence[Any], status: RowStatus, origin: RowOrigin) -> dict[str, Any]:
    """Unpacked by position (see `results.EXPORT_COLUMNS`): by name it would take most of an export's time."""
    (
        row, _, _, output, embedding, finish_reason, error_kind, error, raw_answer, model, account,
        input_tokens, cached_input, cache_write, output_tokens, reasoning, cost, unknown, calls,
        cached, sanitized, latency_ms, ttft_ms, _,
    ) = record  # fmt: skip
    if embedding is not None:
        output = list(struct.unpack(f"<{len(embedding) // 4}f", embedding))
    elif output is None and raw_answer is not None and status is RowStatus.INVALID:
        output = raw_answer  # the last answer as it came
    elif view.structured and status is RowStatus.OK and output is not None:
        output = _parsed(output)
    usage = None
    if input_tokens is not None:
        usage = {
            "input": input_tokens,
            "cached_input": cached_input or 0,
            "cache_write": cache_write or 0,
            "output": output_tokens or 0,
            "reasoning": reasoning or 0,
        }
    return {
        "row": row,
        "custom_id": origin.custom_id,
        "status": status,
        "output": output,
        "error": None if error_kind is None else {"kind": error_kind, "message": error or ""},
        "finish_reason": finish_reason,
        "model": model,
        "account": account,
        "usage": usage,
        "cost_usd": _usd(cost),
        "unknown_usd": _usd(unknown),
        "calls": calls,
        "cached": bool(cached),
        "latency_ms": latency_ms,
        "ttft_ms": ttft_ms,
        "sanitized": bool(sanitized) or origin.sanitized,
        "source": origin.source,
        "line": origin.line,
    }


def _parsed(output: str) -> Any:
    try:
        return orjson.loads(output)
    except orjson.JSONDecodeError:
        return output


_NOTHING = dict.fromkeys(
    ("output", "finish_reason", "model", "account", "usage", "cost_usd", "unknown_usd", "latency_ms", "ttft_ms")
)


def _unanswered(view: _View, row: int, status: RowStatus, origin: RowOrigin) -> dict[str, Any]:
    known = {
        **_NOTHING,
        "row": row,
        "custom_id": origin.custom_id,
        "status": status,
        "error": {"kind": "crashed", "message": view.dead[row]} if row in view.dead else None,
        "calls": 0,
        "cached": False,
        "sanitized": origin.sanitized,
        "source": origin.source,
        "line": origin.line,
    }
    return {c: known[c] for c in _PLAIN}


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
    if format not in FORMATS:
        raise ConfigurationError(f"format {format!r} is not known; there are {', '.join(FORMATS)}")
    if format == "jsonl" and columns is None:
        return _write(out, _whole_json_lines(_stream(database, job_id, statuses)))
    found = stream_results(database, job_id, statuses=statuses)
    if format == "csv":
        return _write(out, _csv_lines(found, columns)) - 1
    return _write(out, _json_lines(found, columns or COLUMNS) if format == "jsonl" else map(_openai_line, found))


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


def _whole_json_lines(found: Iterable[tuple[dict[str, Any], bytes]]) -> Iterator[bytes]:
    """All columns, the input spliced in as it was stored."""
    for fields, raw in found:
        yield b'%b,"input":%b}\n' % (orjson.dumps(fields)[:-1], raw)


def _json_lines(found: Iterable[Result], columns: Sequence[str]) -> Iterator[bytes]:
    for r in found:
        yield orjson.dumps(_picked(r, columns), option=orjson.OPT_APPEND_NEWLINE)


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
