"""From a data set to an open job: whole or not at all, once per key, whatever dies in between."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.exc import OperationalError

from batchmill_core.catalog import Catalog
from batchmill_core.errors import ConfigurationError, JobError, JobStopped, SourceError, UserError
from batchmill_core.job import JobState, Rows
from batchmill_core.payload import decode_frame
from batchmill_core.request import TaskKind
from batchmill_core.settings import Settings
from batchmill_core.usage import nanousd
from batchmill_db import jobs, loading, payload_store, rounds, steering
from batchmill_db.doorbells import Doorbell
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import chunk, job, leader, payload, round_
from batchmill_db.session import Database, DatabaseError
from batchmill_producers import loader
from batchmill_producers import submit as module
from batchmill_producers.submit import Submission, submit
from tests.mill import MODEL, QUEUE, catalog_for, new_database, settings_for

CASES = Path(__file__).parents[1] / "cases" / "inputs"
CHUNK = 50


class Counter:
    """Where jobs are handed in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database: Database = new_database(folder)
        self.settings: Settings = settings_for(folder, catalog_for())

    def submit(self, dataset: Any = None, **options: Any) -> JobRecord:
        tools = {k: options.pop(k) for k in ("ring", "progress") if k in options}
        return submit(
            self.database, self.settings, wanted(self.data() if dataset is None else dataset, **options), **tools
        )

    def data(self, count: int = 500, text: str = "review") -> Path:
        path = self.folder / "reviews.jsonl"
        path.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(count)))
        return path

    def one(self, query: Any) -> Any:
        with self.database.reading() as conn:
            return conn.execute(query).scalar_one()

    def count(self, table: Any) -> int:
        return int(self.one(select(func.count()).select_from(table)))

    def jobs(self) -> list[JobRecord]:
        with self.database.reading() as conn:
            return jobs.newest(conn)

    def nothing_left(self) -> bool:
        """Whether no job is there, nor anything that belonged to one."""
        return not any(map(self.count, (job, round_, payload, chunk, leader)))

    def assert_whole(self, record: JobRecord, count: int) -> None:
        """Every row is in exactly one payload and in exactly one chunk."""
        with self.database.reading() as conn:
            texts = conn.execute(select(chunk.c.rows).where(chunk.c.job_id == record.id)).scalars()
            in_chunks = [n for t in texts for n in Rows.parse(t)]
            in_payloads = [f + i for f, n, _ in payload_store.payload_digests(conn, record.id) for i in range(n)]
        assert sorted(in_chunks) == in_payloads == list(range(count))
        assert (record.state, record.n_rows, record.loaded) == (JobState.OPEN, count, True)

    def requests(self, record: JobRecord) -> list[dict[str, Any]]:
        with self.database.reading() as conn:
            frames = payload_store.requests_of(conn, record.id, Rows.span(0, record.n_rows))
        return [json.loads(line) for _, _, frame in frames for line in decode_frame(frame)]


def wanted(dataset: Any, **options: Any) -> Submission:
    given: Mapping[str, Any] = {"model": MODEL, "prompt": "Label: {{ text }}", "chunk_size": CHUNK, **options}
    return Submission(dataset=dataset, **given)


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    monkeypatch.setattr(loader, "ROWS_PER_TRANSACTION", 100)
    made = Counter(tmp_path)
    yield made
    made.database.close()


# A whole job


def test_every_row_is_saved_rendered_and_in_a_chunk(counter: Counter) -> None:
    record = counter.submit()

    counter.assert_whole(record, 500)
    assert counter.requests(record)[7] == {"messages": [{"role": "user", "content": "Label: review 7"}]}
    assert (counter.count(chunk), record.name, record.model) == (10, "reviews", MODEL)


def test_progress_is_told_as_rows_are_saved(counter: Counter) -> None:
    told: list[int] = []

    counter.submit(progress=told.append)

    assert told == [100, 200, 300, 400, 500]


def test_the_first_chunks_are_rung_for_after_the_job_is_open(counter: Counter) -> None:
    rung: list[Doorbell] = []
    states: list[JobState] = []

    def ring(bell: Doorbell) -> None:
        rung.append(bell)
        states.append(counter.jobs()[0].state)

    counter.submit(ring=ring)

    assert [b.chunk_id for b in rung] == list(range(1, 9))
    assert (rung[0].queue, rung[0].label) == (QUEUE, f"reviews · rows 0-49 · {MODEL}")
    assert set(states) == {JobState.OPEN}


def test_nothing_runs_before_the_whole_data_set_is_read(counter: Counter) -> None:
    states: list[JobState] = []

    counter.submit(progress=lambda _: states.append(counter.jobs()[0].state))

    assert set(states) == {JobState.LOADING}


@pytest.mark.parametrize("rows", [[{"text": "a"}, {"text": "b"}], iter([{"text": "a"}, {"text": "b"}])])
def test_python_rows_are_a_data_set(counter: Counter, rows: Any) -> None:
    counter.assert_whole(counter.submit(rows), 2)


# Refused as a whole


def refusal(counter: Counter, dataset: Any, kind: type[Exception] = SourceError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        counter.submit(dataset, **options)
    return str(caught.value)


def test_a_bad_line_refuses_the_job_as_a_whole_and_names_it(counter: Counter) -> None:
    words = refusal(counter, CASES / "bad-line-3.jsonl")

    assert "3" in words
    assert counter.nothing_left()


def test_bad_lines_are_listed_when_they_are_to_be_skipped(counter: Counter) -> None:
    record = counter.submit(CASES / "bad-line-3.jsonl", skip_bad_rows=True)

    counter.assert_whole(record, 3)
    assert (record.n_skipped, [b["line"] for b in record.skipped]) == (1, [3])


def test_a_row_without_the_column_refuses_the_job_even_at_the_very_end(counter: Counter) -> None:
    rows = [{"text": "x"}] * 250 + [{"other": "x"}]

    words = refusal(counter, rows, UserError)

    assert "text" in words
    assert counter.nothing_left()


def test_an_iterable_that_breaks_leaves_no_half_job(counter: Counter) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from [{"text": "x"}] * 250
        raise RuntimeError("the user's own fault")

    words = refusal(counter, rows(), Exception)

    assert "the user's own fault" in words
    assert counter.nothing_left()


def test_ctrl_c_leaves_no_half_job_without_a_key(counter: Counter) -> None:
    def interrupt(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counter.submit(progress=interrupt)

    assert counter.nothing_left()


def test_a_job_that_is_cancelled_while_it_loads_stays_cancelled(counter: Counter) -> None:
    def cancel(_: int) -> None:
        counter.database.run(lambda conn: steering.cancel(conn, 1))

    words = refusal(counter, counter.data(), JobError, progress=cancel)

    assert "was cancelled while" in words
    assert counter.jobs()[0].state is JobState.CANCELLED
    assert counter.one(select(func.count()).select_from(chunk).where(chunk.c.state == "ready")) == 0


# One job per key


KILLED_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from batchmill_db.session import Database
from batchmill_producers import loader
from batchmill_producers import submit as module
from tests.mill import catalog_for, settings_for
from tests.unit.test_submit import wanted

loader.ROWS_PER_TRANSACTION = 100
folder = Path(sys.argv[1])
def die(rows):
    if rows >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
database = Database(f"sqlite:///{folder / 'batchmill.db'}")
module.submit(database, settings_for(folder, catalog_for()), wanted(folder / "reviews.jsonl", key="k"), progress=die)
"""


def kill_half_way(counter: Counter, at: int = 300) -> None:
    command = [sys.executable, "-c", KILLED_HALF_WAY, str(counter.folder), str(at)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=False)
    assert ended.returncode == -signal.SIGKILL
    (half,) = counter.jobs()
    assert (half.state, half.n_rows) == (JobState.LOADING, at)


def test_a_loader_that_was_killed_half_way_is_gone_on_with(counter: Counter) -> None:
    counter.data()
    kill_half_way(counter)
    told: list[int] = []

    record = counter.submit(counter.folder / "reviews.jsonl", key="k", progress=told.append)

    assert len(counter.jobs()) == 1
    counter.assert_whole(record, 500)
    assert counter.requests(record)[499]["messages"][0]["content"] == "Label: review 499"


@pytest.mark.parametrize(("count", "text"), [(500, "other"), (200, "review"), (299, "review")])
def test_other_data_under_a_key_that_began_is_refused_and_the_right_data_still_goes(
    counter: Counter, count: int, text: str
) -> None:
    counter.data()
    kill_half_way(counter)

    words = refusal(counter, counter.data(count, text), JobError, key="k")
    record = counter.submit(counter.data(), key="k")

    assert "is not the one that job" in words
    counter.assert_whole(record, 500)


def test_the_same_key_again_is_the_same_job(counter: Counter) -> None:
    first = counter.submit(key="k")

    second = counter.submit(key="k")

    assert (first.id, len(counter.jobs()), counter.count(chunk)) == (second.id, 1, 10)


@pytest.mark.parametrize(
    ("changed", "named", "half_way"),
    [
        ({"prompt": "Say {{ text }}"}, "prompt", True),
        ({"prompt": "Say {{ text }}"}, "prompt", False),
        ({"params": {"max_tokens": 9}}, "params", False),
        ({"limit": 3}, "limit", False),
    ],
)
def test_other_options_under_the_same_key_are_refused_by_name(
    counter: Counter, changed: dict[str, Any], named: str, half_way: bool
) -> None:
    counter.data()
    if half_way:
        kill_half_way(counter)
    else:
        counter.submit(key="k")

    words = refusal(counter, counter.folder / "reviews.jsonl", JobError, key="k", **changed)

    assert f"another {named}" in words
    assert len(counter.jobs()) == 1


def test_a_job_gone_on_with_keeps_the_chunk_size_that_it_began_with(counter: Counter) -> None:
    counter.data()
    kill_half_way(counter)

    record = counter.submit(counter.folder / "reviews.jsonl", key="k", chunk_size=7)

    counter.assert_whole(record, 500)
    assert counter.count(chunk) == 10


def test_a_job_that_failed_to_load_can_be_given_again_with_other_options(counter: Counter) -> None:
    refusal(counter, [{"text": 1}, {"other": 1}], UserError, key="k")

    record = counter.submit(
        counter.data(),
        key="k",
        prompt="New {{ text }}",
        params={"max_tokens": 3},
        budget_nanousd=nanousd(1),
        name="new",
    )

    counter.assert_whole(record, 500)
    assert (record.budget_nanousd, record.name) == (nanousd(1), "new")
    assert counter.requests(record)[0]["messages"][0]["content"] == "New review 0"
    with counter.database.reading() as conn:
        assert rounds.spec_of(conn, record.id, 1).params == {"max_tokens": 3}


def test_two_submitters_of_one_key_make_one_whole_job(counter: Counter) -> None:
    counter.data()
    both_found_nothing = threading.Barrier(2, timeout=10)
    made: list[JobRecord] = []
    faults: list[Exception] = []
    begin = module._begin

    def begin_together(*args: Any) -> Any:
        if args[3] is None:
            both_found_nothing.wait()
        return begin(*args)

    def hand_in() -> None:
        try:
            made.append(counter.submit(counter.folder / "reviews.jsonl", key="k"))
        except Exception as fault:  # noqa: BLE001  # shown by the assertion
            faults.append(fault)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_begin", begin_together)
        threads = [threading.Thread(target=hand_in) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)

    assert faults == []
    assert {r.id for r in made} == {counter.jobs()[0].id}
    counter.assert_whole(counter.jobs()[0], 500)


def test_a_second_submitter_with_other_data_is_refused_while_the_first_loads(counter: Counter) -> None:
    others = counter.folder / "others.jsonl"
    others.write_text('{"text": "other"}\n' * 500)
    words: list[str] = []

    def meanwhile(rows: int) -> None:
        if rows == 100:
            words.append(refusal(counter, others, JobError, key="k"))

    record = counter.submit(key="k", progress=meanwhile)

    assert "is not the one that job" in words[0]
    counter.assert_whole(record, 500)


def test_a_key_whose_job_was_made_of_other_rows_says_which(counter: Counter) -> None:
    record = counter.submit(key="k")

    words = [
        refusal(counter, counter.data(500, "other"), JobError, key="k"),
        refusal(counter, counter.data(501), JobError, key="k"),
        refusal(counter, counter.data(320), JobError, key="k"),
        refusal(counter, counter.data(20), JobError, key="k"),
    ]

    assert all(f"job {record.public_id} of key 'k' (reviews.jsonl)" in w for w in words)
    assert "some of rows 0 to 49 differ" in words[0]
    assert "more than the 500 rows" in words[1]
    assert all("ends after" in w for w in words[2:])
    counter.assert_whole(counter.jobs()[0], 500)


def test_the_same_rows_written_anew_are_the_same_data_set(counter: Counter) -> None:
    first = counter.submit(key="k")
    os.utime(counter.folder / "reviews.jsonl", ns=(1, 1))

    assert counter.submit(counter.folder / "reviews.jsonl", key="k").id == first.id


def test_a_file_that_nobody_touched_is_not_read_again_for_its_key(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = counter.submit(key="k")
    monkeypatch.setattr(module, "prepare", lambda *_: pytest.fail("it was read again"))

    assert counter.submit(counter.folder / "reviews.jsonl", key="k").id == first.id


def test_a_bad_row_of_an_eager_job_may_be_left_out_under_the_same_key(counter: Counter) -> None:
    path = counter.data()
    with path.open("a") as out:
        out.write('nonsense\n{"text": "the last"}\n')

    with pytest.raises(JobStopped) as caught:
        counter.submit(path, key="k", eager=True)
    record = counter.submit(path, key="k", eager=True, skip_bad_rows=True)

    assert "line 501" in str(caught.value)
    assert "run the same command with the key k" in str(caught.value)
    assert record.n_skipped == 1
    counter.assert_whole(record, 501)


def test_an_id_that_comes_twice_late_pauses_an_eager_job(counter: Counter) -> None:
    rows = [{"text": str(n), "id": n} for n in range(120)]

    with pytest.raises(JobStopped, match="id '7' was already on row 8"):
        counter.submit([*rows, {"text": "x", "id": 7}], eager=True, id_column="id")
    (paused,) = counter.jobs()
    record = counter.submit(rows, key=paused.public_id, eager=True, id_column="id")

    assert (paused.state, paused.reason_kind, paused.key) == (JobState.PAUSED, "source", paused.public_id)
    assert record.id == paused.id
    counter.assert_whole(record, 120)


def test_an_eager_job_whose_first_row_is_bad_leaves_nothing(counter: Counter) -> None:
    refusal(counter, [{"text": object()}], SourceError, eager=True)

    assert counter.nothing_left()


def test_other_rows_than_an_eager_job_began_with_leave_it_as_it_was(counter: Counter) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield from ({"text": str(n)} for n in range(120))
        raise OSError("gone")

    with pytest.raises(JobStopped, match="gone"):
        counter.submit(broken(), key="k", eager=True)
    words = refusal(counter, [{"text": "other"}] * 120, JobError, key="k", eager=True)

    (paused,) = counter.jobs()
    assert "rows 0 to 49 differ" in words
    assert (paused.state, paused.n_rows) == (JobState.PAUSED, 120)
    assert "gone" in (paused.reason or "")


# No room left


@pytest.fixture
def small_disk(counter: Counter) -> Iterator[Any]:
    """Gives what makes the database's disk full at so many pages, or gives it room again."""

    def hold(pages: int) -> None:
        counter.database.close()
        event.listen(counter.database.engine, "connect", lambda c, _: c.execute(f"PRAGMA max_page_count={pages}"))

    return hold


def pages_of(counter: Counter) -> int:
    with counter.database.reading() as conn:
        return int(conn.exec_driver_sql("PRAGMA page_count").scalar_one())


@pytest.mark.parametrize("eager", [False, True])
def test_a_full_disk_is_told_at_once_and_leaves_nothing_that_runs(
    counter: Counter, small_disk: Any, eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    small_disk(pages_of(counter))

    with pytest.raises(DatabaseError, match=r"the disk of the database at .* is full .*; make room"):
        counter.submit([{"text": str(n) * 500} for n in range(500)], eager=eager)

    left = counter.jobs()
    assert caplog.records == []
    assert eager or counter.nothing_left()
    assert all(j.state is JobState.PAUSED and "is full" in (j.reason or "") for j in left)


def test_a_half_read_job_that_a_full_disk_kept_is_dropped_by_the_next_submission(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> bool:
        raise OperationalError("DELETE", {}, sqlite3.OperationalError("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr(loading, "drop", no_room)
        refusal(counter, [{"text": "x"}] * 250 + [{"other": "x"}], UserError)
    kept = [j.state for j in counter.jobs()]
    record = counter.submit()

    assert kept == [JobState.LOADING]
    assert [j.id for j in counter.jobs()] == [record.id]


# What is checked before a row is read


def test_a_budget_needs_a_price(counter: Counter) -> None:
    counter.settings = settings_for(counter.folder, catalog_for(price=None))

    words = refusal(counter, [{"text": "x"}], ConfigurationError, budget_nanousd=1, params={"max_tokens": 5})

    assert f"'{MODEL}' has none" in words
    assert counter.jobs() == []


def test_a_budget_needs_the_longest_answer(counter: Counter) -> None:
    words = refusal(counter, [{"text": "x"}], ConfigurationError, budget_nanousd=1)

    assert "--param max_tokens=N" in words


def test_a_budget_of_embeddings_needs_no_longest_answer(counter: Counter) -> None:
    record = counter.submit([{"text": "x"}], budget_nanousd=1, task=TaskKind.EMBED, prompt="{{ text }}")

    assert record.budget_nanousd == 1


@pytest.mark.parametrize("name", ["model", "messages", "stream", "response_format"])
def test_a_parameter_that_batchmill_sets_itself_is_refused(counter: Counter, name: str) -> None:
    assert f"'{name}'" in refusal(counter, [{"text": "x"}], ConfigurationError, params={name: 1})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "'#/$defs/missing'"),
        ({"items": {"$ref": "http://127.0.0.1:9/x.json"}}, "nothing is fetched"),
        ({"type": "string", "pattern": "("}, "'(' is not a 'regex'"),
    ],
)
def test_a_schema_that_no_answer_could_be_checked_by_is_refused(
    counter: Counter, schema: dict[str, Any], said: str
) -> None:
    assert said in refusal(counter, [{"text": "x"}], ConfigurationError, schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}}},
        {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}},
        {"$defs": {"a": {"$anchor": "here"}}, "$ref": "#here"},
        {"$id": "https://acme.example/s", "$defs": {"a": {"$id": "a", "type": "string"}}, "items": {"$ref": "a"}},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}, "$ref": "#/definitions/a"},
        {"$schema": "https://acme.example/dialect", "$defs": {"a": {}}, "$ref": "#/$defs/a"},
        {"const": {"$ref": "#/nowhere"}},
    ],
)
def test_a_schema_whose_references_are_in_it_is_taken(counter: Counter, schema: dict[str, Any]) -> None:
    assert submit(counter.database, counter.settings, wanted([{"text": "x"}], schema=schema)).state is JobState.OPEN


def test_a_schema_that_is_none_is_refused(counter: Counter) -> None:
    assert "$.type" in refusal(counter, [{"text": "x"}], ConfigurationError, schema={"type": "nonsense"})


def test_an_unknown_model_is_named_with_the_nearest(counter: Counter) -> None:
    assert f"did you mean '{MODEL}'" in refusal(counter, [{"text": "x"}], ConfigurationError, model="m-11")


# OpenAI batch files


def test_an_openai_batch_file_brings_its_requests_ids_and_its_own_model(counter: Counter) -> None:
    path = counter.folder / "batch.jsonl"
    path.write_text((CASES / "openai-batch.jsonl").read_text())
    own = json.loads(path.read_text().splitlines()[0])["body"]["model"]
    counter.settings = settings_for(counter.folder, rename(own))

    record = counter.submit(path, model=None, prompt=None)

    counter.assert_whole(record, 3)
    assert record.model == own


def test_a_given_model_wins_over_the_batch_files_own(counter: Counter) -> None:
    record = counter.submit(CASES / "openai-batch.jsonl", prompt=None)

    assert record.model == MODEL


def rename(model: str) -> Catalog:
    catalog = catalog_for()
    return replace(catalog, models={model: replace(catalog.models[MODEL], name=model)})


@pytest.mark.parametrize("case", ["openai-batch-duplicate-id.jsonl", "openai-batch-stream-true.jsonl", "empty.jsonl"])
def test_data_sets_that_cannot_be_answered_leave_nothing_to_run(counter: Counter, case: str) -> None:
    refusal(counter, CASES / case, prompt=None, key=None)

    assert counter.nothing_left()


# What is said though nothing is wrong


CHAT_TEXT = json.dumps([{"role": "user", "content": "Hello"}])


def notes_and_requests(counter: Counter, rows: list[dict[str, str]], **options: Any) -> tuple[list[str], list[Any]]:
    notes: list[str] = []
    record = submit(counter.database, counter.settings, wanted(rows, **options), note=notes.append)
    return notes, counter.requests(record)


def test_a_prompt_without_a_column_is_noted(counter: Counter) -> None:
    notes, _ = notes_and_requests(counter, [{"text": "a"}], prompt="Label: {text}")

    assert notes == ["the prompt takes nothing from the rows: all ask the same. A column is written {{ text }}"]


def test_messages_as_json_text_are_read_when_their_column_is_named_and_noted_when_not(counter: Counter) -> None:
    rows = [{"messages": CHAT_TEXT}]

    named_notes, named = notes_and_requests(counter, rows, prompt=None, messages_column="messages")
    found_notes, found = notes_and_requests(counter, rows, prompt=None)

    assert (named_notes, named[0]["messages"]) == ([], [{"role": "user", "content": "Hello"}])
    assert found[0]["messages"] == [{"role": "user", "content": CHAT_TEXT}]
    assert found_notes == [
        "the column 'messages' holds JSON as text, which is sent as it stands; with --messages-column messages it is read "
        "as messages"
    ]


def test_texts_stay_texts_where_the_first_one_is_no_json(counter: Counter) -> None:
    _, requests = notes_and_requests(counter, [{"m": "hi"}, {"m": CHAT_TEXT}], prompt=None, messages_column="m")

    assert [r["messages"][0]["content"] for r in requests] == ["hi", CHAT_TEXT]
