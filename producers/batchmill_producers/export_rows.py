"""Results in row order, streamed from the database one payload at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from batchmill_core.job import JobState
from batchmill_core.payload import RowOrigin, decode_frame, may_hold_long_integer, split_input
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import usd
from batchmill_db import jobs, payload_store, reaping, rounds, saved_results
from batchmill_db.session import Database

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
    "inter_token_ms",
    "sanitized",
    "source",
    "line",
    "input",
)
_PLAIN = tuple(c for c in COLUMNS if c != "input")
_STATUS = {s.value: s for s in RowStatus}
_usd = lru_cache(maxsize=4096)(usd)


class Vector(list[float]):
    """An embedding, told apart from a list that a model answered under a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row's result. ``input`` is the row as its source gave it; ``output`` is text, JSON under a schema, or floats.

    A classification's output is ``{"label": …, "score": …, "scores": {label: score, …}}``, the best label first.

    ``cost_usd`` is the settled sum of all the row's calls of its round and ``usage`` the tokens of those calls; unknown is
    None, never 0. ``ttft_ms`` is the time to the first token, ``inter_token_ms`` the mean time from each token to the next
    (see `inter_token_ms`).
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
    inter_token_ms: float | None
    sanitized: bool
    source: str | None
    line: int | None
    raw_input: bytes

    @property
    def input(self) -> dict[str, Any]:
        return loads_input(self.raw_input)

    def as_dict(self) -> dict[str, Any]:
        """The result under the names, and in the order, of a JSON line."""
        return {c: getattr(self, c) for c in COLUMNS}


def loads_input(raw: bytes) -> dict[str, Any]:
    """A row's input as it was stored, integers of any size among it."""
    found: dict[str, Any] = json.loads(raw) if may_hold_long_integer(raw) else orjson.loads(raw)
    return found


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
    for fields, raw in stream_fields(database, job_id, statuses):
        yield Result(**fields, raw_input=raw)


def stream_fields(
    database: Database, job_id: int, statuses: Iterable[RowStatus] | None
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The fields of each result, in the order of a JSON line, and its input as stored."""
    with database.reading() as conn:
        job = jobs.get(conn, job_id)
        spec = rounds.spec_of(conn, job_id, job.round)
        view = _View(
            job_id=job_id,
            structured=spec.schema is not None or spec.task is TaskKind.CLASSIFY,
            cancelled=job.state is JobState.CANCELLED,
            dead=reaping.dead_rows(conn, job_id),
            statuses=None if statuses is None else frozenset(statuses),
        )
    next_row = 0
    while True:
        with database.reading() as conn:
            found = payload_store.inputs_after(conn, job_id, next_row)
            if found is None:
                return
            first, n_rows, frame = found
            saved = saved_results.between(conn, job_id, first, first + n_rows - 1)
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
    """Unpacked by position (see `saved_results.EXPORT_COLUMNS`): by name it would take most of an export's time."""
    (
        row, _, _, output, embedding, finish_reason, error_kind, error, raw_answer, model, account,
        input_tokens, cached_input, cache_write, output_tokens, reasoning, cost, unknown, calls,
        cached, sanitized, latency_ms, ttft_ms, _,
    ) = record  # fmt: skip
    if embedding is not None:
        output = Vector(struct.unpack(f"<{len(embedding) // 4}f", embedding))
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
        "inter_token_ms": inter_token_ms(latency_ms, ttft_ms, output_tokens) if calls == 1 else None,
        "sanitized": bool(sanitized) or origin.sanitized,
        "source": origin.source,
        "line": origin.line,
    }


def inter_token_ms(latency_ms: int | None, ttft_ms: int | None, output_tokens: int | None) -> float | None:
    """The mean inter-token latency of one call: what followed the first token, shared among the tokens after it.

    None where the answer did not stream, or had fewer than two tokens. A row that took several calls has none either,
    since its usage is the sum over them.
    """
    if latency_ms is None or ttft_ms is None or output_tokens is None or output_tokens < 2:
        return None
    return round(max(0, latency_ms - ttft_ms) / (output_tokens - 1), 2)


def _parsed(output: str) -> Any:
    try:
        return orjson.loads(output)
    except orjson.JSONDecodeError:
        return output


_NOTHING = dict.fromkeys(
    (
        *("output", "finish_reason", "model", "account", "usage", "cost_usd", "unknown_usd"),
        *("latency_ms", "ttft_ms", "inter_token_ms"),
    )
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
