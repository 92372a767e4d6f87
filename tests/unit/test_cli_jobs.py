"""The commands about jobs, on an embedded database of jobs that workers have answered."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from batchmill.cli import main
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import rounds, steering, telemetry
from tests.prepared_jobs import PreparedFolder

OK, FAILED, INVALID, TRUNCATED = RowStatus.OK, RowStatus.FAILED, RowStatus.INVALID, RowStatus.TRUNCATED
MIXED = (OK, TRUNCATED, FAILED, INVALID)
KEYS = ["job_id", "name", "state", "reason", "rows", "done", "by_status", "errors", "usage", "cost_usd", "unknown_usd"]
KEYS += ["rows_per_s", "tokens_per_s", "seconds"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedFolder]:
    monkeypatch.chdir(tmp_path)
    prepared = PreparedFolder(tmp_path)
    yield prepared
    prepared.database.close()


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints as JSON; it must end well."""
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


def test_show_as_json_has_the_promised_keys_in_order(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = folder.done(MIXED)

    shown = facts(capsys, "show", job.public_id, "--json")

    assert list(shown) == KEYS
    assert (shown["job_id"], shown["state"], shown["rows"], shown["done"]) == (job.public_id, "done", 4, 4)
    assert shown["by_status"] == {"ok": 1, "truncated": 1, "invalid": 1, "failed": 1}
    assert shown["errors"]["invalid_request"] == {"count": 1, "row": 2, "message": "what was wrong with row 2"}
    assert shown["usage"] == {"input": 40, "cached_input": 0, "cache_write": 0, "output": 8, "reasoning": 0}
    assert Decimal(shown["cost_usd"]) == Decimal("0.000028")
    assert shown["unknown_usd"] is None


def test_show_for_people_tells_statuses_costs_and_an_example_of_each_error(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.done(MIXED)

    assert main(["show", "reviews"]) == 0

    said = capsys.readouterr().out
    assert "1 ok · 1 truncated · 1 invalid · 1 failed" in said
    assert "1 × invalid_request, as row 2: what was wrong with row 2" in said
    assert "$0.000028 spent" in said


def test_show_says_which_worker_is_missing(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    job = folder.submit()

    assert main(["show", "reviews"]) == 0

    said = capsys.readouterr().out
    assert f"no live worker serves queue api.sim; start one: batchmill resume {job.public_id}" in said


def test_show_with_a_broker_names_the_worker_command(
    folder: PreparedFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.submit()
    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://127.0.0.1:1/0")

    assert main(["show", "reviews"]) == 0

    assert "start one: batchmill worker api --accounts sim" in capsys.readouterr().out


def test_jobs_lists_the_newest_first_with_the_keys_of_show(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.done(name="first")
    folder.done(MIXED, name="second")

    listed = facts(capsys, "jobs", "--json")

    assert [j["name"] for j in listed] == ["second", "first"]
    assert [list(j) for j in listed] == [KEYS, KEYS]


def test_jobs_of_an_empty_folder_is_an_empty_list_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert facts(capsys, "jobs", "--json") == []
    assert list(tmp_path.iterdir()) == []


def test_results_go_to_stdout_in_row_order(folder: PreparedFolder, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    folder.done(MIXED)

    assert main(["results", "reviews"]) == 0

    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [(r["row"], r["status"]) for r in lines] == [(0, "ok"), (1, "truncated"), (2, "failed"), (3, "invalid")]
    assert lines[0]["input"] == {"text": "good"}


def test_results_can_be_picked_by_status_and_columns(
    folder: PreparedFolder, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder.done(MIXED)
    picked = ["--status", "ok,truncated", "--columns", "text,output", "--format", "csv"]

    assert main(["results", "reviews", *picked]) == 0

    rows = list(csv.reader(io.StringIO(capfdbinary.readouterr().out.decode())))
    assert rows == [["text", "output"], ["good", "answer 0"], ["bad", "answer 1"]]


def test_results_to_a_file_take_its_suffix_as_the_format(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.done()

    assert main(["results", "reviews", "-o", "out.csv"]) == 0

    assert len((folder.path / "out.csv").read_text().splitlines()) == 5
    assert capsys.readouterr().err == "4 results written to out.csv\n"


def test_a_file_is_not_there_when_writing_it_fails(folder: PreparedFolder) -> None:
    folder.done()

    assert main(["results", "reviews", "-o", "out.csv", "--columns", "nope"]) == 2

    assert [p.name for p in folder.path.iterdir() if "out" in p.name] == []


def test_a_reader_that_has_had_enough_is_no_error(folder: PreparedFolder) -> None:
    folder.done()
    command = [sys.executable, "-m", "batchmill.cli", "results", "reviews"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()

        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_results_of_a_status_that_is_none_are_refused(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.done()

    assert main(["results", "reviews", "--status", "good"]) == 2
    assert "there is no status 'good'; known: cancelled, dead, failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("show reviws", "there is no job 'reviws'; did you mean 'reviews'? `batchmill jobs` lists them"),
        ("show something-else", "there is no job 'something-else'; `batchmill jobs` lists them"),
        ("results reviews --columns row,outptu", "row 0 has no column 'outptu'; did you mean 'output'? There are row,"),
        ("results reviews -o x.parquet --columns txet", "no column 'txet' in Parquet; did you mean 'text'? There are"),
    ],
)
def test_a_mistyped_job_or_column_names_the_nearest(
    command: str, words: str, folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.done()

    assert main(command.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("by", "key"), [("model", "sim-chat"), ("account", "sim"), ("worker", "worker"), ("job", None), ("day", None)]
)
def test_costs_by(folder: PreparedFolder, capsys: pytest.CaptureFixture[str], by: str, key: str | None) -> None:
    job = folder.done()

    spent = facts(capsys, "costs", "--by", by, "--json")

    assert len(spent) == 1
    assert Decimal(spent[0]["cost_usd"]) == Decimal("0.000028")
    assert spent[0]["calls"] == 4
    assert by == "day" or spent[0][by] == (key or job.public_id)


def test_rm_keeps_the_ledger(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.done()

    assert main(["rm", "reviews"]) == 0

    assert main(["show", "reviews"]) == 2
    capsys.readouterr()
    assert facts(capsys, "costs", "--json")[0]["calls"] == 4


def test_rm_refuses_a_job_that_runs(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.submit()

    assert main(["rm", "reviews"]) == 2
    assert "cancel it before you remove it" in capsys.readouterr().err


def test_pause_says_how_to_go_on(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    job = folder.submit()

    assert main(["pause", "reviews"]) == 0

    assert folder.read(job).state is JobState.PAUSED
    assert capsys.readouterr().err.endswith(f"go on with: batchmill resume {job.public_id}\n")


def test_pause_again_is_no_error_but_a_job_that_is_done_cannot_be_paused(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.submit(name="open")
    folder.done(name="ended")

    assert [main(["pause", "open"]), main(["pause", "open"]), main(["pause", "ended"])] == [0, 0, 2]
    assert "is done; only an open job can be paused" in capsys.readouterr().err


def test_resume_with_a_broker_opens_the_job_raises_the_budget_and_returns(
    folder: PreparedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = folder.submit(budget_nanousd=1)
    main(["pause", "reviews"])
    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://127.0.0.1:1/0")

    assert main(["resume", "reviews", "--budget", "2.50"]) == 0

    assert folder.read(job).state is JobState.OPEN
    assert folder.read(job).budget_nanousd == 2_500_000_000


def test_resume_tries_a_stopped_account_again(folder: PreparedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    job = folder.submit()
    folder.database.run(
        lambda conn: telemetry.stop_account(conn, "sim", kind="auth_failed", reason="bad key", probe_after_ms=60_000)
    )
    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://127.0.0.1:1/0")

    assert main(["resume", "reviews"]) == 0

    assert folder.read(job).state is JobState.OPEN
    with folder.database.reading() as conn:
        assert telemetry.accounts(conn)["sim"].state == "ok"


def test_resume_of_a_job_that_is_done_shows_it_with_its_exit_code(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.done(MIXED)

    assert main(["resume", "reviews", "--json"]) == 1

    said = capsys.readouterr()
    assert json.loads(said.out)["state"] == "done"
    assert "is done already" in said.err


def test_cancel_counts_open_rows_as_cancelled(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.submit()

    assert main(["cancel", "reviews"]) == 0

    shown = facts(capsys, "show", "reviews", "--json")
    assert (shown["state"], shown["by_status"]) == ("cancelled", {"cancelled": 4})


def test_retry_with_a_broker_opens_the_next_round_of_what_ended_badly(
    folder: PreparedFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = folder.done(MIXED)
    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://127.0.0.1:1/0")

    assert main(["retry", "reviews", "--param", "temperature=0.5"]) == 0

    again = folder.read(job)
    assert (again.state, again.round) == (JobState.OPEN, 2)
    with folder.database.reading() as conn:
        assert rounds.spec_of(conn, job.id, 2).params == {"max_tokens": 8, "temperature": 0.5}
    assert capsys.readouterr().err.startswith(f"2 rows of job {job.public_id} are asked again\n")


def test_retry_without_such_rows_says_so(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.done()

    assert main(["retry", "reviews", "--status", "invalid"]) == 0
    assert "has no row of status invalid" in capsys.readouterr().err


def test_submit_prints_the_id_alone_and_says_how_to_start_workers(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "data.jsonl", "-m", "sim-chat", "-p", "Label: {{ text }}"]) == 0

    said = capsys.readouterr()
    job_id = said.out.strip()
    assert said.out == f"{job_id}\n"
    assert facts(capsys, "show", job_id, "--json")["rows"] == 4
    assert said.err == (f"saved 4 rows; no live worker serves queue api.sim; start one: batchmill resume {job_id}\n")


def test_submit_with_the_same_key_answers_the_same_job(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["submit", "data.jsonl", "-m", "sim-chat", "-p", "Label: {{ text }}", "--key", "k"]

    assert [main(command), main(command)] == [0, 0]

    first, second = capsys.readouterr().out.split()
    assert first == second


def test_estimate_has_the_promised_keys_and_saves_nothing(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    estimated = facts(capsys, "estimate", "data.jsonl", "-m", "sim-chat", "-p", "Label: {{ text }}", "--json")

    assert {"rows", "skipped", "tokens", "cost_usd", "problems"} <= set(estimated)
    assert estimated["rows"] == 4
    assert list(estimated["cost_usd"]) == ["low", "high"]
    assert facts(capsys, "jobs", "--json") == []


@pytest.mark.parametrize(("statuses", "code"), [((OK, TRUNCATED, OK, RowStatus.REFUSED), 0), (MIXED, 1)])
def test_watch_of_an_ended_job_exits_by_how_its_rows_ended(
    folder: PreparedFolder, statuses: tuple[RowStatus, ...], code: int
) -> None:
    folder.done(statuses)

    assert main(["watch", "reviews"]) == code


def test_watch_of_a_paused_job_exits_with_3_and_what_to_do(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = folder.submit()
    folder.database.run(lambda conn: steering.pause(conn, job.id, kind="budget", reason="budget of $1 is used up"))

    assert main(["watch", "reviews"]) == 3

    assert capsys.readouterr().err.splitlines()[-1] == (
        f"batchmill: job {job.public_id} is paused: budget of $1 is used up; raise it and go on: "
        f"`batchmill resume {job.public_id} --budget USD`"
    )


def test_watch_without_a_job_takes_the_newest_that_is_open(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.submit(name="older")
    newest = folder.submit(name="newest")
    folder.done(name="done")

    assert main(["watch", "--give-up-after", "0s"]) == 3

    said = capsys.readouterr().err
    assert "the newest of 2 open jobs" in said
    assert f"newest {newest.public_id}: 0 of 4 rows" in said
    assert said.splitlines()[-1].startswith("batchmill: no live worker serves queue api.sim; start one: batchmill")


def test_watch_without_a_job_and_none_open_names_the_newest(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = folder.done()

    assert main(["watch"]) == 2
    assert f"no job is open; the newest is done: `batchmill show {job.public_id}`" in capsys.readouterr().err


def test_watch_says_that_no_worker_serves_the_job_and_waits_for_one(folder: PreparedFolder) -> None:
    job = folder.submit()
    command = [sys.executable, "-m", "batchmill.cli", "watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        folder.answer(job, [OK] * 4)

        assert process.wait(60) == 0

    assert f"waits: no live worker serves queue api.sim; start one: batchmill resume {job.public_id}" in first


def test_verify_finds_nothing_in_a_sound_job_and_the_broken_invariant_in_another(
    folder: PreparedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    job = folder.done()

    assert main(["doctor", "--verify", "reviews"]) == 0
    assert capsys.readouterr().out == f"job {job.public_id}: every invariant holds\n"

    with folder.database.transaction() as conn:
        conn.exec_driver_sql("DELETE FROM result WHERE row = 2")
    assert main(["doctor", "--verify", "reviews", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["violations"]


def test_db_upgrade_says_from_where_to_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert [main(["db", "upgrade"]), main(["db", "upgrade"])] == [0, 0]

    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("(before: none)")
    assert second.endswith("already")


def test_a_configured_database_without_tables_names_the_command(
    folder: PreparedFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCHMILL_DATABASE_URL", "sqlite:///new.db")

    assert main(["jobs"]) == 2
    assert "run `batchmill db upgrade`" in capsys.readouterr().err
