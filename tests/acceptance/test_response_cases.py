"""What providers answer, over real HTTP, through the real worker, down to row, call, ledger and number of calls."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.job import JobState
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import Price, usd
from batchmill_db import telemetry
from batchmill_db.jobs import JobRecord
from tests.acceptance.more_responses import VARIANTS
from tests.mill import ACCOUNT, MODEL, PRICE, Mill, catalog_for, milling
from tests.scripted_server import ScriptedServer, scripted

FOLDER = Path(__file__).parents[1] / "cases" / "responses"
CASES: dict[str, Mapping[str, Any]] = {p.stem: json.loads(p.read_text()) for p in sorted(FOLDER.glob("*.json"))}
ALL = {**CASES, **VARIANTS}
RETRIES = 2
GOOD_USAGE = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}


def among(condition: Any) -> Any:
    """The cases that a test is about, by name."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=name) for name, c in ALL.items() if condition(c)])


def is_final(case: Mapping[str, Any]) -> bool:
    return not case["expect"].get("retry") and "scope" not in case["expect"]


def is_retried_at_once(case: Mapping[str, Any]) -> bool:
    return bool(case["expect"].get("retry")) and case["expect"].get("wait_s", 0) <= 5


def good(case: Mapping[str, Any]) -> dict[str, Any]:
    """What a healthy provider would have answered."""
    if inputs := case.get("inputs"):
        data = [{"index": i, "embedding": [0.5 + i]} for i, _ in enumerate(inputs)]
        return {"json": {"data": data, "usage": {"prompt_tokens": 4, "total_tokens": 4}}}
    content = '{"label": "positive"}' if case.get("schema") else "positive"
    message = {"role": "assistant", "content": content}
    return {"json": {"choices": [{"message": message, "finish_reason": "stop"}], "usage": GOOD_USAGE}}


def as_script(response: Mapping[str, Any]) -> dict[str, Any]:
    """Servers that send text close the connection after it, as a stream that is cut does."""
    return {**response, "close": True} if "text" in response else dict(response)


@contextmanager
def served(
    case: Mapping[str, Any], folder: Path, patch: pytest.MonkeyPatch, *then: Mapping[str, Any], **account: Any
) -> Iterator[tuple[Mill, JobRecord, ScriptedServer]]:
    """A job of this case's rows, and a server that gives the case's answer first."""
    prices = case.get("price_usd_per_mtok")
    price = PRICE if prices is None else Price.from_usd_per_mtok(prices)
    with scripted([as_script(case["response"]), *then]) as server:
        catalog = catalog_for(server.base_url, price=price, max_retries=RETRIES, **account)
        with milling(folder, catalog, patch) as mill:
            yield mill, mill.submit(**options_of(case)), server


def options_of(case: Mapping[str, Any]) -> dict[str, Any]:
    content_type = case["response"].get("headers", {}).get("content-type", "")
    options: dict[str, Any] = {"schema": case.get("schema"), "stream": "event-stream" in content_type}
    if inputs := case.get("inputs"):
        options |= {"rows": [{"text": t} for t in inputs], "prompt": "{{ text }}", "task": TaskKind.EMBED, "params": {}}
    return options


def usage_of(record: Mapping[str, Any]) -> dict[str, int] | None:
    kinds = ("input", "cached_input", "cache_write", "output", "reasoning")
    found = {k: record[f"{k}_tokens"] for k in kinds}
    return None if found["input"] is None else found


def full_usage(expected: Mapping[str, int]) -> dict[str, int]:
    return {k: expected.get(k, 0) for k in ("input", "cached_input", "cache_write", "output", "reasoning")}


def assert_sums(mill: Mill, job: JobRecord) -> None:
    """Rows, calls and the job agree to the nano-USD, and nothing is in flight any more."""
    assert mill.violations(job) == []
    calls, rows, now = mill.calls(job), mill.rows(job), mill.job(job)
    assert {c["state"] for c in calls} <= {"settled", "void", "unknown"}
    settled = sum(c["cost_nanousd"] or 0 for c in calls if c["state"] == "settled")
    unknown = sum(c["bound_nanousd"] or 0 for c in calls if c["state"] == "unknown")
    assert (now.cost_nanousd, now.unknown_nanousd) == (settled, unknown)
    assert now.calls == sum(c["state"] != "void" for c in calls)
    if now.state is JobState.DONE:
        assert sum(r["cost_nanousd"] or 0 for r in rows) == settled
        assert sum(r["unknown_nanousd"] or 0 for r in rows) == unknown
        assert sum(r["input_tokens"] or 0 for r in rows) == sum(c["input_tokens"] or 0 for c in calls)


def test_every_case_is_tested() -> None:
    groups = [
        is_final,
        is_retried_at_once,
        lambda c: c["expect"].get("wait_s", 0) > 5,
        lambda c: "scope" in c["expect"],
    ]

    assert [name for name, c in ALL.items() if sum(bool(g(c)) for g in groups) != 1] == []
    assert len(CASES) == 33


# Answers that end the row


@among(is_final)
def test_a_final_answer_ends_the_row_with_one_call(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = case["expect"]
    with served(case, tmp_path, monkeypatch) as (mill, job, server):
        mill.run(job)

        (one_call,) = mill.calls(job)
        rows = mill.rows(job)
        assert len(server.requests) == 1
        assert {r["status"] for r in rows} == {expect.get("status", "ok")}
        assert {r["calls"] for r in rows} == {0 if one_call["state"] == "void" else 1}  # as tries are counted
        assert {r["error_kind"] for r in rows} == {expect.get("error", one_call["error_kind"])}
        assert mill.job(job).state is JobState.DONE
        assert_outputs(mill, job, case)
        assert_money(one_call, rows, expect)
        assert_sums(mill, job)


def assert_outputs(mill: Mill, job: JobRecord, case: Mapping[str, Any]) -> None:
    expect, exported = case["expect"], mill.exported(job)
    if "outputs" in expect:
        as_floats = [list(struct.unpack(f"<{len(v)}f", struct.pack(f"<{len(v)}f", *v))) for v in expect["outputs"]]
        assert [line["output"] for line in exported] == as_floats
    if "output" in expect:
        assert exported[0]["output"] == expect["output"]
    if "output" in expect and isinstance(expect["output"], dict):
        assert json.loads(mill.rows(job)[0]["output"]) == expect["output"]
    assert mill.rows(job)[0]["sanitized"] == expect.get("sanitized", False)
    assert (mill.rows(job)[0]["ttft_ms"] is not None) == expect.get("has_ttft", False)


def assert_money(one_call: Mapping[str, Any], rows: list[dict[str, Any]], expect: Mapping[str, Any]) -> None:
    if expect.get("usage"):
        assert one_call["state"] == "settled"
        assert usage_of(one_call) == full_usage(expect["usage"])
        assert one_call["cost_nanousd"] == sum(r["cost_nanousd"] for r in rows)
        assert not one_call["wasted"]
    elif "usage" in expect:
        assert (one_call["state"], usage_of(one_call), one_call["cost_nanousd"]) == ("unknown", None, None)
        assert (rows[0]["cost_nanousd"], usage_of(rows[0])) == (None, None)
        assert rows[0]["unknown_nanousd"] == one_call["bound_nanousd"] > 0
    elif one_call["http_status"] != 200:
        assert (one_call["state"], rows[0]["cost_nanousd"]) == ("void", None)
    if "cost_usd" in expect:
        assert usd(one_call["cost_nanousd"]) == expect["cost_usd"]


@among(lambda c: c["expect"].get("status") == "filtered" and c["response"]["status"] == 400)
def test_a_filtered_prompt_says_why(case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(case, tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        (row,) = mill.rows(job)
        assert (row["error_kind"], row["status"]) == ("filtered", "filtered")
        assert str(case["response"]["status"]) in row["error"]
        assert row["raw"]


# Answers that another call may better


@among(is_retried_at_once)
def test_a_fault_is_retried_and_the_next_answer_counts(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect, answer = case["expect"], good(case)
    with served(case, tmp_path, monkeypatch, answer) as (mill, job, server):
        mill.run(job)

        first, second = mill.calls(job)
        rows = mill.rows(job)
        assert len(server.requests) == 2
        assert {(r["status"], r["error_kind"]) for r in rows} == {("ok", None)}
        assert first["error_kind"] == expect["error"]
        assert (second["state"], second["error_kind"]) == ("settled", None)
        assert_first_call(first, rows, case)
        assert_waited(mill, expect)
        assert len(mill.chunks(job)) == 1
        assert_sums(mill, job)


def assert_first_call(first: Mapping[str, Any], rows: list[dict[str, Any]], case: Mapping[str, Any]) -> None:
    """The failed call is settled where its usage is known, and unknown with its bound where it may have been billed."""
    body = case["response"].get("json")
    billed = isinstance(body, dict) and bool(body.get("usage"))
    if case["expect"].get("call_cost") == "unknown_with_bound":
        assert (first["state"], first["cost_nanousd"]) == ("unknown", None)
        assert first["bound_nanousd"] == sum(r["unknown_nanousd"] for r in rows) > 0
    elif billed:
        assert (first["state"], bool(first["wasted"])) == ("settled", True)
        assert first["cost_nanousd"] > 0
    elif case["response"]["status"] in (429, 503, 529):
        assert first["state"] == "void"
    else:
        assert first["state"] in ("void", "unknown")
    assert {r["calls"] for r in rows} == {1 if first["state"] == "void" else 2}


def assert_waited(mill: Mill, expect: Mapping[str, Any]) -> None:
    """In the loop: once, for at least what was asked, or else for the jittered half second of a first failure."""
    (waited,) = mill.time.waits
    least = expect.get("wait_s", 0.0)
    assert least <= waited <= least + max(least, 0.5)


@among(lambda c: is_retried_at_once(c) and c["expect"]["error"] != "rate_limited")
def test_a_fault_that_stays_ends_the_row_when_the_tries_are_used_up(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = case["expect"]
    with served(case, tmp_path, monkeypatch) as (mill, job, server):
        mill.run(job)

        rows = mill.rows(job)
        assert len(server.requests) == 1 + RETRIES
        assert {r["status"] for r in rows} == {expect.get("final_status", "failed")}
        assert {r["error_kind"] for r in rows} == {expect["error"]}
        assert {c["error_kind"] for c in mill.calls(job)} == {expect["error"]}
        assert len(mill.calls(job)) == 1 + RETRIES
        assert_sums(mill, job)


@among(lambda c: c["expect"].get("keeps_raw_body"))
def test_a_row_that_failed_keeps_the_start_of_the_answer(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(case, tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        (row,) = mill.rows(job)
        assert '"choices"' in row["raw"]


def test_an_answer_that_breaks_the_schema_is_kept_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(CASES["schema-violation"], tmp_path, monkeypatch) as (mill, job, _):
        mill.run(job)

        (row,), (line,) = mill.rows(job), mill.exported(job)
        assert row["raw"] == line["output"] == '{"label": 3}'
        assert line["error"]["kind"] == "invalid_output"
        assert "$.label" in line["error"]["message"]
        assert all(c["state"] == "settled" and c["cost_nanousd"] == 20_800 for c in mill.calls(job))


# Waits that are longer than a row stays in the loop


@among(lambda c: c["expect"].get("wait_s", 0) > 5)
def test_a_long_wait_becomes_a_derived_chunk(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_s = case["expect"]["wait_s"]
    with served(case, tmp_path, monkeypatch, good(case)) as (mill, job, server):
        before_ms = time.time() * 1000
        mill.run(job)

        parent, child = mill.chunks(job)
        assert len(server.requests) == 1
        assert (parent["state"], child["state"], child["rows"]) == ("done", "ready", "0")
        assert wait_s - 1 <= (child["not_before_ms"] - before_ms) / 1000 <= wait_s + 10
        assert mill.time.waits == []
        assert mill.rows(job) == []
        assert [c["state"] for c in mill.calls(job)] == ["void"]
        assert mill.job(job).state is JobState.OPEN
        assert_sums(mill, job)


@among(lambda c: c["expect"].get("wait_s", 0) > 5)
def test_a_row_that_waited_long_is_answered_when_its_time_has_come(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(case, tmp_path, monkeypatch, good(case)) as (mill, job, server):
        mill.run(job)
        mill.let_pass(job, case["expect"]["wait_s"] + 10)
        mill.run(job)

        assert len(server.requests) == 2
        assert [(r["status"], r["calls"]) for r in mill.rows(job)] == [("ok", 1)]
        assert mill.job(job).state is JobState.DONE
        assert_sums(mill, job)


# Faults that are not the row's


@among(lambda c: c["expect"].get("scope") == "account")
def test_a_fault_of_the_account_stops_it_with_one_call_and_rows_keep_their_turn(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = case["expect"]["error"]
    rows = [{"text": str(i)} for i in range(20)]
    with served(case, tmp_path, monkeypatch, max_in_flight=1) as (mill, _, server):
        job = mill.submit(rows, chunk_size=20)
        mill.run(job)

        now = mill.job(job)
        with mill.database.reading() as conn:
            account = telemetry.accounts(conn)[ACCOUNT]
        assert len(server.requests) == 1
        assert (account.state, account.reason_kind) == ("stopped", kind)
        assert (now.state, now.reason_kind, now.reason_account) == (JobState.PAUSED, "account", ACCOUNT)
        assert kind in (now.reason or "")
        assert mill.rows(job) == []
        assert [(c["rows"], c["not_before_ms"]) for c in mill.chunks(job) if c["state"] == "ready"] == [("0-19", 0)]
        assert {c["state"] for c in mill.calls(job)} == {"void"}
        assert_sums(mill, job)


@among(lambda c: c["expect"].get("scope") == "account")
def test_rows_go_on_with_all_their_tries_when_the_account_is_healed(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(case, tmp_path, monkeypatch, good(case), max_in_flight=1) as (mill, job, server):
        mill.run(job)
        mill.database.run(lambda conn: telemetry.heal_account(conn, ACCOUNT))
        mill.run(job)

        assert len(server.requests) == 2
        assert [(r["status"], r["calls"]) for r in mill.rows(job)] == [("ok", 1)]
        assert mill.job(job).state is JobState.DONE
        assert_sums(mill, job)


@among(lambda c: c["expect"].get("scope") == "job")
def test_a_fault_of_the_job_pauses_it_with_one_call(
    case: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": str(i)} for i in range(20)]
    with served(case, tmp_path, monkeypatch, max_in_flight=1) as (mill, _, server):
        job = mill.submit(rows, chunk_size=20)
        mill.run(job)

        now = mill.job(job)
        with mill.database.reading() as conn:
            accounts = telemetry.accounts(conn)
        assert len(server.requests) == 1
        assert (now.state, now.reason_kind) == (JobState.PAUSED, case["expect"]["error"])
        assert MODEL in (now.reason or "")
        assert now.by_status[RowStatus.FAILED] == 0
        assert ACCOUNT not in accounts or accounts[ACCOUNT].state == "ok"
        assert [c["rows"] for c in mill.chunks(job) if c["state"] == "ready"] == ["0-19"]
        assert_sums(mill, job)
