"""The next round of a job: which rows are asked again, what replaces what, and what it all counts to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.errors import ConfigurationError, JobError
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import chunks, reaping, rounds
from batchmill_db.jobs import JobRecord
from batchmill_producers.retry import retry
from tests.mill import Mill, catalog_for, milling
from tests.scripted_server import RecordedRequest, ScriptedServer, scripted

USAGE = {"prompt_tokens": 10, "completion_tokens": 5}
CALL_NANOUSD = 12_000


class Provider:
    """Answers row "N" as the test says; anything else is "yes"."""

    def __init__(self) -> None:
        self.faults: dict[str, Mapping[str, Any]] = {}

    def answer(self, request: RecordedRequest) -> Mapping[str, Any]:
        text = request.json["messages"][-1]["content"].removeprefix("Label: ")
        return self.faults.get(text, said("yes"))


def said(text: str, finish: str = "stop") -> Mapping[str, Any]:
    return {"json": {"choices": [{"message": {"content": text}, "finish_reason": finish}], "usage": USAGE}}


REFUSED = {"status": 400, "json": {"error": {"message": "wrong"}}}
TOO_LONG = {"status": 400, "json": {"error": {"code": "context_length_exceeded", "message": "long"}}}


class Desk:
    def __init__(self, mill: Mill, provider: Provider, server: ScriptedServer) -> None:
        self.mill, self.provider, self.server = mill, provider, server

    def first_round(self, count: int = 6, **options: Any) -> JobRecord:
        job = self.mill.submit([{"text": str(i)} for i in range(count)], **options)
        self.mill.run(job)
        return self.mill.job(job)

    def retry(self, job: JobRecord, **options: Any) -> int:
        return retry(self.mill.database, self.mill.settings, job.id, **options)

    def second_round(self, job: JobRecord, **options: Any) -> JobRecord:
        self.retry(job, **options)
        self.mill.run(job)
        return self.mill.job(job)

    def outputs(self, job: JobRecord) -> list[tuple[str, Any]]:
        return [(line["status"], line["output"]) for line in self.mill.exported(job)]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    provider = Provider()
    with scripted(provider.answer) as server, milling(tmp_path, catalog_for(server.base_url), monkeypatch) as mill:
        yield Desk(mill, provider, server)


def test_rows_that_ended_badly_are_asked_again_and_only_these(desk: Desk) -> None:
    desk.provider.faults = {"1": REFUSED, "4": TOO_LONG}
    job = desk.first_round()
    desk.provider.faults = {}
    before = len(desk.server.requests)

    now = desk.second_round(job)

    assert len(desk.server.requests) - before == 2
    assert desk.outputs(job) == [("ok", "yes")] * 6
    assert (now.state, now.round, now.by_status[RowStatus.OK]) == (JobState.DONE, 2, 6)
    assert now.by_status[RowStatus.FAILED] == now.by_status[RowStatus.TOO_LONG] == 0
    assert desk.mill.violations(job) == []


def test_a_round_counts_its_calls_on_top_of_those_before(desk: Desk) -> None:
    desk.provider.faults = {"0": said("cut", "length")}
    job = desk.first_round(2)

    now = desk.second_round(job, statuses=[RowStatus.TRUNCATED])

    assert (now.calls, now.cost_nanousd, now.usage.input) == (3, 3 * CALL_NANOUSD, 30)
    assert [c["round"] for c in desk.mill.calls(job)] == [1, 1, 2]
    assert desk.mill.violations(job) == []


def test_the_old_result_stays_until_it_is_replaced(desk: Desk) -> None:
    desk.provider.faults = {"0": said("cut", "length")}
    job = desk.first_round(2)

    asked = desk.retry(job, statuses=[RowStatus.TRUNCATED])

    assert asked == 1
    assert desk.outputs(job) == [("truncated", "cut"), ("ok", "yes")]
    assert desk.mill.job(job).state is JobState.OPEN


def test_a_row_that_ends_badly_again_has_its_newest_end(desk: Desk) -> None:
    desk.provider.faults = {"0": REFUSED}
    job = desk.first_round(2)
    desk.provider.faults = {"0": TOO_LONG}

    now = desk.second_round(job)

    assert [s for s, _ in desk.outputs(job)] == ["too_long", "ok"]
    assert (now.by_status[RowStatus.FAILED], now.by_status[RowStatus.TOO_LONG], now.done) == (0, 1, 2)
    assert desk.mill.violations(job) == []


def test_parameters_of_a_round_are_asked_with_and_the_others_stay(desk: Desk) -> None:
    desk.provider.faults = {"0": said("cut", "length")}
    job = desk.first_round(1, params={"max_tokens": 20, "temperature": 0})
    desk.provider.faults = {}

    desk.second_round(job, statuses=[RowStatus.TRUNCATED], params={"max_tokens": 99})

    first, second = (r.json for r in desk.server.requests)
    assert (first["max_tokens"], second["max_tokens"], second["temperature"]) == (20, 99, 0)
    with desk.mill.database.reading() as conn:
        assert rounds.spec_of(conn, job.id, 1).params["max_tokens"] == 20


@pytest.mark.parametrize("name", ["model", "messages", "stream"])
def test_a_parameter_that_batchmill_sets_itself_is_refused(desk: Desk, name: str) -> None:
    job = desk.first_round(1)

    with pytest.raises(ConfigurationError, match=name):
        desk.retry(job, statuses=[RowStatus.OK], params={name: "x"})


def test_an_unknown_model_is_refused_and_no_round_opens(desk: Desk) -> None:
    job = desk.first_round(1)

    with pytest.raises(ConfigurationError, match="m-2"):
        desk.retry(job, statuses=[RowStatus.OK], model="m-2")

    assert desk.mill.job(job).round == 1


def test_with_nothing_to_ask_again_nothing_happens(desk: Desk) -> None:
    job = desk.first_round(2)

    assert desk.retry(job) == 0
    assert (desk.mill.job(job).state, desk.mill.job(job).round) == (JobState.DONE, 1)


def test_a_job_that_is_not_done_cannot_be_retried(desk: Desk) -> None:
    job = desk.mill.submit([{"text": "0"}])

    with pytest.raises(JobError, match="only a job that is done"):
        desk.retry(job)


def test_a_third_round_follows_the_second(desk: Desk) -> None:
    desk.provider.faults = {"0": REFUSED}
    job = desk.first_round(2)
    desk.second_round(job)
    desk.provider.faults = {}

    now = desk.second_round(job)

    assert (now.round, now.by_status[RowStatus.OK], now.by_status[RowStatus.FAILED]) == (3, 2, 0)
    assert desk.mill.violations(job) == []


def test_tries_begin_anew_in_each_round(desk: Desk) -> None:
    desk.provider.faults = {"0": {"status": 500, "json": {"error": {"message": "internal"}}}}
    job = desk.first_round(1)
    tries = len(desk.server.requests)

    desk.second_round(job)

    assert (tries, len(desk.server.requests)) == (3, 6)
    assert [r["calls"] for r in desk.mill.rows(job)] == [3]
    assert desk.mill.violations(job) == []


def test_a_dead_row_is_asked_again(desk: Desk) -> None:
    job = desk.mill.submit([{"text": "0"}])
    for _ in range(reaping.CRASH_LIMIT):
        desk.mill.database.run(lambda conn: chunks.claim(conn, 1, "w", lease_ms=60_000))
        desk.mill.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=["w"]))
        desk.mill.database.run(reaping.reap)
    assert desk.mill.job(job).by_status[RowStatus.DEAD] == 1

    now = desk.second_round(job)

    assert desk.outputs(job) == [("ok", "yes")]
    assert (now.by_status[RowStatus.DEAD], now.by_status[RowStatus.OK]) == (0, 1)
    assert desk.mill.violations(job) == []
