"""Loading while the data set is read: the intake between two threads, loaders that overtake each other, late faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.errors import JobError, JobStopped
from batchmill_core.job import JobState
from batchmill_db import steering
from batchmill_db.jobs import JobRecord
from batchmill_producers import eager
from batchmill_producers.chunking import PackedRow
from batchmill_producers.eager import Intake
from tests.unit.test_submit import CHUNK, Counter

ROW = PackedRow(request=b"{}", input=b"{}")
ROWS = 120  # two full chunks and a part
WAIT_S = 30.0


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    made = Counter(tmp_path)
    yield made
    made.database.close()


def rows(first: int = 0, last: int = ROWS) -> list[dict[str, Any]]:
    return [{"text": f"review {n}", "id": n} for n in range(first, last)]


# The intake


def test_full_chunks_are_taken_without_waiting_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_PATIENCE_S", 3600.0)
    intake = Intake()
    for _ in range(3):
        intake.put(ROW)

    assert len(intake.take(3)) == 3


def test_a_row_that_comes_late_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_PATIENCE_S", 0.01)
    intake = Intake()
    intake.put(ROW)

    assert intake.take(50) == [ROW]
    assert intake.take(50) == []
    assert not intake.ended


def test_the_last_rows_are_taken_at_once_and_then_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_PATIENCE_S", 3600.0)
    intake = Intake()
    intake.put(ROW)
    intake.end(whole=True)

    assert not intake.ended
    assert intake.take(50) == [ROW]
    assert intake.ended
    assert intake.whole


def test_the_first_word_on_how_it_ended_counts() -> None:
    intake = Intake()
    intake.end(whole=False)
    intake.end(whole=True)

    assert not intake.whole


@pytest.mark.parametrize(("rows_held", "bytes_held"), [(2, 10**9), (10**9, 8)])
def test_who_reads_too_fast_waits_until_something_is_saved(
    rows_held: int, bytes_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "ROWS_PER_TRANSACTION", rows_held)
    monkeypatch.setattr(eager, "BYTES_PER_TRANSACTION", bytes_held)
    monkeypatch.setattr(eager, "_PATIENCE_S", 3600.0)
    intake, put = Intake(), threading.Semaphore(0)

    def read() -> None:
        for _ in range(5):
            intake.put(ROW)
            put.release()
        intake.end(whole=True)

    taken: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        while not intake.ended:
            taken.append(len(intake.take(10**6)))
        reading.result(WAIT_S)

    assert sum(taken) == 5
    assert max(taken) == 2  # more are never held


def test_what_failed_while_saving_is_raised_where_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "ROWS_PER_TRANSACTION", 1)
    intake = Intake()
    intake.put(ROW)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(intake.put, ROW)  # there is no room for it
        intake.fail(OSError("the disk is gone"))

        with pytest.raises(OSError, match="the disk is gone"):
            waiting.result(WAIT_S)
    with pytest.raises(OSError, match="the disk is gone"):
        intake.check()


# Several loaders of one job


def test_a_loader_that_another_overtook_ends_with_the_whole_job(counter: Counter) -> None:
    def overtaken() -> Iterator[dict[str, Any]]:
        yield from rows(0, 60)
        counter.submit(rows(), key="k", eager=True)
        yield from rows(60)

    record = counter.submit(overtaken(), key="k", eager=True)

    assert len(counter.jobs()) == 1
    counter.assert_whole(record, ROWS)


def test_a_loader_that_another_overtook_half_way_goes_on_from_there(counter: Counter) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from rows(0, 100)
        raise OSError("the pipe broke")

    def overtaken() -> Iterator[dict[str, Any]]:
        yield from rows(0, 60)
        with pytest.raises(JobStopped, match="the pipe broke"):
            counter.submit(broken(), key="k", eager=True)
        yield from rows(60)

    record = counter.submit(overtaken(), key="k", eager=True)

    counter.assert_whole(record, ROWS)


@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.parametrize(
    ("then", "words"),
    [
        (rows(500, 600), "some of rows"),
        (rows(CHUNK, ROWS + 1), f"it has more than the {ROWS} rows"),
        (rows(CHUNK, CHUNK + 5), f"it ends after {CHUNK + 5} rows"),
    ],
)
def test_a_loader_that_was_overtaken_by_other_rows_is_refused(
    counter: Counter, eagerly: bool, then: list[dict[str, Any]], words: str
) -> None:
    def other() -> Iterator[dict[str, Any]]:
        yield from rows(0, CHUNK)
        counter.submit(rows(), key="k", eager=True)
        yield from then

    with pytest.raises(JobError, match=words):
        counter.submit(other(), key="k", eager=eagerly)

    counter.assert_whole(counter.jobs()[0], ROWS)


# Faults that show late


LATE_FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an id that comes twice": ({"text": "x", "id": 7}, {"id_column": "id"}, "id '7' was already on row 8"),
    "an id that is missing": ({"text": "x"}, {"id_column": "id"}, "there is no id column 'id'"),
    "a column that is missing": ({"id": ROWS}, {}, f"row {ROWS}: the prompt template: 'text' is undefined"),
    "a template that fails": ({"text": None}, {"prompt": "{{ text.upper() }}"}, f"row {ROWS}"),
    "a value that cannot be stored": ({"text": object()}, {}, f"row {ROWS + 1}"),
    "messages that are none": ({"text": 7}, {"prompt": None, "messages_column": "text"}, "must be a list of messages"),
}


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_a_fault_in_a_late_row_pauses_the_job_and_the_mended_rows_go_on(counter: Counter, fault: str) -> None:
    bad, options, words = LATE_FAULTS[fault]

    with pytest.raises(JobStopped) as caught:
        counter.submit([*rows(), bad], eager=True, **options)
    (paused,) = counter.jobs()
    record = counter.submit([*rows(), *rows(ROWS, ROWS + 1)], key=paused.public_id, eager=True, **options)

    assert words in str(caught.value)
    assert f"run the same command with the key {paused.public_id}" in str(caught.value)
    assert (paused.state, paused.reason_kind, paused.n_rows) == (JobState.PAUSED, "source", ROWS)
    assert record.id == paused.id
    counter.assert_whole(record, ROWS + 1)


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_a_fault_in_a_late_row_is_left_out_when_bad_rows_are(counter: Counter, fault: str) -> None:
    bad, options, _ = LATE_FAULTS[fault]

    record = counter.submit([*rows(), bad, *rows(ROWS, ROWS + 1)], eager=True, skip_bad_rows=True, **options)

    assert record.n_skipped == 1
    counter.assert_whole(record, ROWS + 1)


def while_read(counter: Counter, act: Callable[[JobRecord], None]) -> Iterator[dict[str, Any]]:
    """All rows, and when the first of them are open to workers, something happens."""
    yield from rows(0, 100)
    while not (found := [j for j in counter.jobs() if j.state is JobState.OPEN]):
        yield from ()
    act(found[0])
    yield from rows(100)


def test_a_job_that_is_cancelled_while_it_is_read_takes_no_more_rows(counter: Counter) -> None:
    def cancel(job: JobRecord) -> None:
        counter.database.run(lambda conn: steering.cancel(conn, job.id))

    with pytest.raises(JobError, match="was cancelled while its data set was being read"):
        counter.submit(while_read(counter, cancel), eager=True)

    (job,) = counter.jobs()
    assert (job.state, job.loaded) == (JobState.CANCELLED, False)


@pytest.mark.parametrize("kind", ["user", "budget", "account"])
def test_a_job_that_is_paused_for_another_reason_is_read_to_its_end_and_stays_paused(
    counter: Counter, kind: str
) -> None:
    def pause(job: JobRecord) -> None:
        counter.database.run(lambda conn: steering.pause(conn, job.id, kind=kind, reason="so it is"))

    record = counter.submit(while_read(counter, pause), eager=True)

    assert (record.state, record.reason_kind, record.loaded, record.n_rows) == (JobState.PAUSED, kind, True, ROWS)


SUBMIT = """
[accounts.sim]
base_url = "http://127.0.0.1:9/v1"
[models.sim-chat]
account = "sim"
"""


def test_submit_names_the_job_before_a_slow_pipe_ends(tmp_path: Path) -> None:
    (tmp_path / "batchmill.toml").write_text(SUBMIT)
    command = [sys.executable, "-m", "batchmill.cli", "submit", "-", "-m", "sim-chat", "-p", "{{ n }}", "--eager"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=clean, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"n": 1}\n')
        process.stdin.flush()
        named = process.stdout.readline().strip()
        rest, said = process.communicate('{"n": 2}\n', timeout=60)

    assert (process.returncode, len(named), rest) == (0, 8, "")
    assert "saved 2 rows" in said
