"""The Python API on an embedded database of jobs that workers have answered; nothing is started here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import batchmill
from batchmill.asked import make_submission, statuses_of
from batchmill_core.errors import ConfigurationError, JobError
from batchmill_core.request import RowStatus, TaskKind
from tests.prepared_jobs import PreparedFolder

MIXED = (RowStatus.OK, RowStatus.TRUNCATED, RowStatus.FAILED, RowStatus.INVALID)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    yield prepared
    prepared.database.close()


@pytest.fixture
def client(folder: PreparedFolder) -> Iterator[batchmill.Client]:
    connected = batchmill.connect(folder=folder.path)
    yield connected
    connected.close()


def test_everything_that_is_promised_can_be_imported() -> None:
    assert all(getattr(batchmill, name) is not None for name in batchmill.__all__)
    assert {"submit", "connect", "job", "Job"} <= set(dir(batchmill))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        batchmill.nosuch  # noqa: B018  # the access is the act


def test_a_job_is_found_by_id_and_name(folder: PreparedFolder, client: batchmill.Client) -> None:
    record = folder.done()

    assert [batchmill.job(r).id for r in (record.public_id, "reviews")] == [record.public_id, record.public_id]
    assert [j.id for j in batchmill.jobs()] == [record.public_id]
    assert repr(batchmill.job("reviews")) == f"Job({record.public_id!r}, name='reviews')"
    with pytest.raises(JobError, match="there is no job 'other'"):
        batchmill.job("other")


def test_results_stream_in_row_order_and_can_be_picked(folder: PreparedFolder, client: batchmill.Client) -> None:
    folder.done(MIXED)
    job = client.job("reviews")

    assert [(r.row, r.status) for r in job.results()] == list(enumerate(MIXED))
    assert [r.row for r in job.results(status="failed,invalid")] == [2, 3]
    assert next(iter(job.results())).output == "answer 0"


def test_cost_and_report(folder: PreparedFolder, client: batchmill.Client) -> None:
    folder.done(MIXED)
    job = client.job("reviews")

    assert job.cost() == batchmill.JobCost(settled="0.000028", unknown=None, wasted="0", reserved="0")
    assert (job.state, job.report().bad_rows) == ("done", 2)


def test_pause_and_cancel(folder: PreparedFolder, client: batchmill.Client) -> None:
    folder.submit()
    job = client.job("reviews")

    job.pause()
    assert job.state == "paused"

    job.cancel()
    assert job.state == "cancelled"
    with pytest.raises(JobError):
        job.pause()


def test_connect_takes_urls_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://elsewhere:6379/0")

    client = batchmill.connect(broker_url="redis://here:6379/0", folder=tmp_path)

    assert client.settings.broker_url == "redis://here:6379/0"
    with pytest.raises(ConfigurationError, match="argument broker_url"):
        batchmill.connect(broker_url="http://here")


def test_options_become_a_submission() -> None:
    submission = make_submission([{"a": 1}], model="m", budget_usd="0.5", task="embed", params=None)

    assert (submission.budget_nanousd, submission.task, submission.params) == (500_000_000, TaskKind.EMBED, {})


@pytest.mark.parametrize(
    ("options", "words"),
    [({"budget_usd": "much"}, "'much' is not an amount of USD"), ({"task": "sing"}, "there are chat")],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_submission([], **options)  # type: ignore[arg-type]  # some of its options


def test_statuses_by_name() -> None:
    assert statuses_of(None) is None
    assert statuses_of("failed, dead") == statuses_of(["failed", "dead"]) == [RowStatus.FAILED, RowStatus.DEAD]
