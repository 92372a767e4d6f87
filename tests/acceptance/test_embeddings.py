"""Many rows in one embedding call: each keeps its own vector, its share of usage and cost, and its own fault."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.job import JobState
from batchmill_core.request import TaskKind
from batchmill_core.usage import Price
from batchmill_db.jobs import JobRecord
from tests.mill import Mill, catalog_for, milling
from tests.scripted_server import RecordedRequest, ScriptedServer, scripted

Answer = Callable[[RecordedRequest], Mapping[str, Any]]
PRICE = Price.from_usd_per_mtok({"input": "0.013"})
BAD = "bad"


def vectors(request: RecordedRequest, tokens: int = 1_000_003) -> Mapping[str, Any]:
    """Each text's vector is its length; the usage divides by nothing."""
    data = [{"index": i, "embedding": [float(len(t))]} for i, t in enumerate(request.json["input"])]
    return {"json": {"data": data[::-1], "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}}


def refusing_bad_rows(request: RecordedRequest) -> Mapping[str, Any]:
    """One bad text fails the whole call, as providers do."""
    if BAD in request.json["input"]:
        return {"status": 400, "json": {"error": {"message": "input contains an invalid text"}}}
    return vectors(request, tokens=10 * len(request.json["input"]))


@contextmanager
def embedding(
    texts: list[str], answer: Answer, folder: Path, patch: pytest.MonkeyPatch
) -> Iterator[tuple[Mill, JobRecord, ScriptedServer]]:
    with scripted(answer) as server, milling(folder, catalog_for(server.base_url, price=PRICE), patch) as mill:
        rows = [{"text": t} for t in texts]
        job = mill.submit(rows, prompt="{{ text }}", task=TaskKind.EMBED, params={}, chunk_size=1000)
        yield mill, job, server


def as_float(row: Mapping[str, Any]) -> float:
    (value,) = struct.unpack("<f", row["embedding"])
    return float(value)


def test_one_call_covers_many_rows_and_each_gets_its_own_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["x" * (1 + i % 7) for i in range(64)]
    with embedding(texts, vectors, tmp_path, monkeypatch) as (mill, job, server):
        mill.run(job)

        assert len(server.requests) == 1
        assert [as_float(r) for r in mill.rows(job)] == [float(len(t)) for t in texts]
        assert [c["rows"] for c in mill.calls(job)] == ["0-63"]
        assert mill.job(job).state is JobState.DONE


def test_usage_and_cost_are_split_to_the_last_token_and_nanousd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["x" * (1 + i % 7) for i in range(61)]
    with embedding(texts, vectors, tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        (one_call,), rows, now = mill.calls(job), mill.rows(job), mill.job(job)
        assert sum(r["input_tokens"] for r in rows) == one_call["input_tokens"] == now.usage.input == 1_000_003
        assert sum(r["cost_nanousd"] for r in rows) == one_call["cost_nanousd"] == now.cost_nanousd == 13_000_039
        assert min(r["cost_nanousd"] for r in rows) > 0
        assert mill.violations(job) == []


def test_a_longer_text_bears_a_larger_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with embedding(["x", "x" * 500], vectors, tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        short, long = mill.rows(job)
        assert long["cost_nanousd"] > 10 * short["cost_nanousd"]


def test_more_rows_than_a_call_takes_are_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with embedding(["x"] * 130, vectors, tmp_path, monkeypatch) as (mill, job, server):
        mill.run(job)

        assert sorted(len(r.json["input"]) for r in server.requests) == [2, 64, 64]
        assert mill.violations(job) == []


@pytest.mark.parametrize("place", [0, 1, 7, 15])
def test_a_bad_row_is_isolated_and_the_others_are_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    texts = ["good"] * 16
    texts[place] = BAD
    with embedding(texts, refusing_bad_rows, tmp_path, monkeypatch) as (mill, job, server):
        mill.run(job)

        statuses = [r["status"] for r in mill.rows(job)]
        assert [i for i, s in enumerate(statuses) if s != "ok"] == [place]
        assert statuses[place] == "failed"
        assert mill.rows(job)[place]["error_kind"] == "invalid_request"
        assert len(server.requests) == 9  # four halvings, two calls each
        assert mill.job(job).usage.input == 150
        assert mill.violations(job) == []


def test_two_bad_rows_are_both_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["good", BAD, "good", "good", "good", BAD, "good", "good"]
    with embedding(texts, refusing_bad_rows, tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        assert [r["status"] == "ok" for r in mill.rows(job)] == [t != BAD for t in texts]
        assert mill.violations(job) == []


def test_a_call_whose_cost_is_unknown_splits_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_usage(request: RecordedRequest) -> Mapping[str, Any]:
        return {"json": {"data": vectors(request)["json"]["data"]}}

    with embedding(["a", "bb", "ccc"], without_usage, tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        (one_call,), rows = mill.calls(job), mill.rows(job)
        assert [r["status"] for r in rows] == ["ok"] * 3
        assert one_call["state"] == "unknown"
        assert sum(r["unknown_nanousd"] for r in rows) == one_call["bound_nanousd"] == mill.job(job).unknown_nanousd
        assert [r["cost_nanousd"] for r in rows] == [None] * 3
        assert mill.violations(job) == []
