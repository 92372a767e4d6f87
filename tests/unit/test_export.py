"""What becomes of results on their way out: order, statuses, columns and money, whatever the format."""

from __future__ import annotations

import csv
import io
import json
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import Usage
from batchmill_db import chunks, reaping, results, steering
from batchmill_db.jobs import JobRecord
from batchmill_db.results import NewResult, Save
from batchmill_db.session import Database
from batchmill_producers.export import write_results
from batchmill_producers.submit import Submission, submit
from tests.mill import MODEL, catalog_for, new_database, settings_for


class Archive:
    """A database with a job whose results a test writes as it likes."""

    def __init__(self, folder: Path) -> None:
        self.database: Database = new_database(folder)
        self.settings = settings_for(folder, catalog_for())

    def job(self, rows: Sequence[Any], **options: Any) -> JobRecord:
        given = {"model": MODEL, "prompt": "x", "chunk_size": 4, "name": "reviews", **options}
        return submit(self.database, self.settings, Submission(dataset=list(rows), **given))

    def answer(self, job: JobRecord, *made: NewResult) -> None:
        """Saves results chunk by chunk, the last chunk first, as workers may."""
        with self.database.reading() as conn:
            last = chunks.counts(conn, job.id).by_state.get("ready", 0)
        for chunk_id in range(last, 0, -1):
            self.database.run(lambda conn, chunk_id=chunk_id: self._save(conn, chunk_id, made))
        self.database.run(steering.finish)

    def _save(self, conn: Any, chunk_id: int, made: Sequence[NewResult]) -> None:
        claim = chunks.claim(conn, chunk_id, "w", lease_ms=60_000)
        if claim is not None:
            own = [r for r in made if r.row in claim.rows]
            results.save(conn, Save(claim=claim, seq=1, results=own, releases=True))

    def export(self, job: JobRecord, **options: Any) -> bytes:
        out = io.BytesIO()
        write_results(self.database, job.id, out, **options)
        return out.getvalue()

    def lines(self, job: JobRecord, **options: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.export(job, **options).splitlines()]

    def table(self, job: JobRecord, **options: Any) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.export(job, format="csv", **options).decode(), newline="")))


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    made = Archive(tmp_path)
    yield made
    made.database.close()


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"t{i}"} for i in range(count)]


def ok(row: int, output: str | None = "yes", **fields: Any) -> NewResult:
    base = {"finish_reason": "stop", "model": MODEL, "account": "acme", "usage": Usage(input=40, output=3), "calls": 1}
    return NewResult(row=row, status=fields.pop("status", RowStatus.OK), output=output, **{**base, **fields})


def bad(row: int, status: RowStatus = RowStatus.FAILED, **fields: Any) -> NewResult:
    return NewResult(row=row, status=status, error_kind="timeout", error="slow", calls=3, **fields)


# One line


def test_a_line_holds_what_the_contract_says_in_its_order(archive: Archive) -> None:
    job = archive.job([{"text": "t"}])
    archive.answer(job, ok(0, cost_nanousd=104_000, latency_ms=412))

    (line,) = archive.lines(job)

    assert line == {
        "row": 0, "custom_id": None, "status": "ok", "output": "yes", "error": None, "finish_reason": "stop",
        "model": MODEL, "account": "acme",
        "usage": {"input": 40, "cached_input": 0, "cache_write": 0, "output": 3, "reasoning": 0},
        "cost_usd": "0.000104", "unknown_usd": None, "calls": 1, "cached": False, "latency_ms": 412, "ttft_ms": None,
        "inter_token_ms": None, "sanitized": False, "source": line["source"], "line": line["line"], "input": {"text": "t"},
    }  # fmt: skip


def test_unknown_is_null_and_never_zero(archive: Archive) -> None:
    job = archive.job(texts(1))
    archive.answer(job, ok(0, usage=None, unknown_nanousd=5_000))

    (line,) = archive.lines(job)

    assert (line["usage"], line["cost_usd"], line["unknown_usd"]) == (None, None, "0.000005")


def test_a_streamed_answer_has_its_mean_inter_token_latency_where_one_call_gave_it(archive: Archive) -> None:
    job = archive.job(texts(4))
    streamed = {"latency_ms": 412, "ttft_ms": 12}
    archive.answer(
        job,
        ok(0, usage=Usage(input=40, output=5), **streamed),
        ok(1, usage=Usage(input=40, output=1), **streamed),
        ok(2, usage=Usage(input=80, output=10), calls=2, **streamed),
        ok(3, usage=None, **streamed),
    )

    assert [x["inter_token_ms"] for x in archive.lines(job)] == [100.0, None, None, None]


def test_lines_are_in_row_order_whoever_finished_first(archive: Archive) -> None:
    job = archive.job(texts(11))
    archive.answer(job, *(ok(n, f"a{n}") for n in reversed(range(11))))

    lines = archive.lines(job)

    assert [(x["row"], x["output"], x["input"]["text"]) for x in lines] == [(n, f"a{n}", f"t{n}") for n in range(11)]


def test_rows_without_a_result_yet_have_no_line(archive: Archive) -> None:
    job = archive.job(texts(6))
    archive.answer(job, ok(1), ok(5))

    assert [x["row"] for x in archive.lines(job)] == [1, 5]


@pytest.mark.parametrize("number", [2**70, -(2**65)])
def test_integers_of_any_size_come_out_as_they_went_in(archive: Archive, number: int) -> None:
    job = archive.job([{"n": number}])
    archive.answer(job, ok(0))

    assert archive.lines(job)[0]["input"] == {"n": number}


@pytest.mark.parametrize(
    ("output", "shown"),
    [('{"label": "a"}', {"label": "a"}), ("[]", []), ("7", 7), ("null", None)],
)
def test_an_answer_under_a_schema_is_json(archive: Archive, output: str, shown: Any) -> None:
    job = archive.job(texts(1), schema={})
    archive.answer(job, ok(0, output))

    assert archive.lines(job)[0]["output"] == shown


def test_a_truncated_answer_under_a_schema_stays_text(archive: Archive) -> None:
    job = archive.job(texts(1), schema={})
    archive.answer(job, ok(0, '{"label', status=RowStatus.TRUNCATED))

    assert archive.lines(job)[0]["output"] == '{"label'


def test_an_answer_without_a_schema_stays_text_even_if_it_is_json(archive: Archive) -> None:
    job = archive.job(texts(1))
    archive.answer(job, ok(0, '{"a": 1}'))

    assert archive.lines(job)[0]["output"] == '{"a": 1}'


def test_an_embedding_is_a_list_of_numbers(archive: Archive) -> None:
    job = archive.job(texts(1), task=TaskKind.EMBED, prompt="{{ text }}")
    archive.answer(job, ok(0, None, embedding=struct.pack("<3f", 0.5, -1.0, 2.0)))

    assert archive.lines(job)[0]["output"] == [0.5, -1.0, 2.0]
    assert archive.table(job)[0]["output"] == "[0.5,-1.0,2.0]"


# Statuses


def test_only_the_statuses_that_were_asked_for_are_written(archive: Archive) -> None:
    job = archive.job(texts(4))
    archive.answer(job, ok(0), bad(1), ok(2, status=RowStatus.TRUNCATED), bad(3, RowStatus.INVALID, raw="last try"))

    lines = archive.lines(job, statuses=[RowStatus.FAILED, RowStatus.INVALID])

    assert [(x["row"], x["output"]) for x in lines] == [(1, None), (3, "last try")]
    assert lines[0]["error"] == {"kind": "timeout", "message": "slow"}


def test_rows_of_a_cancelled_job_that_got_no_answer_are_cancelled(archive: Archive) -> None:
    job = archive.job(texts(6))
    archive.database.run(lambda conn: archive._save(conn, 1, [ok(1)]))
    archive.database.run(lambda conn: steering.cancel(conn, job.id))

    assert [x["status"] for x in archive.lines(job)] == ["cancelled", "ok"] + ["cancelled"] * 4


def test_a_row_that_brought_its_workers_down_is_dead_and_says_so(archive: Archive) -> None:
    job = archive.job(texts(1))
    for _ in range(reaping.CRASH_LIMIT):
        archive.database.run(lambda conn: chunks.claim(conn, 1, "w", lease_ms=60_000))
        archive.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=["w"]))
        archive.database.run(reaping.reap)

    (line,) = archive.lines(job)

    assert (line["status"], line["output"], line["calls"]) == ("dead", None, 0)
    assert line["error"]["kind"] == "crashed"
    assert "3 times" in line["error"]["message"]


# Columns


CLASHING = {
    "output": "mine",
    "row": "seven",
    "text": "t",
    "input": "i",
    "status": "",
    "a,b": 'say "hi"\nthere',
    "é ": None,
}


def test_columns_of_the_input_that_are_called_like_ours_do_no_harm_in_json(archive: Archive) -> None:
    job = archive.job([CLASHING])
    archive.answer(job, ok(0, "ours"))

    (line,) = archive.lines(job)

    assert (line["row"], line["output"], line["status"]) == (0, "ours", "ok")
    assert line["input"] == CLASHING


def test_columns_of_the_input_that_are_called_like_ours_get_a_name_of_their_own_in_csv(archive: Archive) -> None:
    job = archive.job([CLASHING])
    archive.answer(job, ok(0, "ours"))

    (row,) = archive.table(job)

    assert (row["row"], row["output"], row["status"]) == ("0", "ours", "ok")
    assert (row["input.output"], row["input.row"], row["text"], row["a,b"]) == ("mine", "seven", "t", 'say "hi"\nthere')
    assert len(row) == len(set(row))


@pytest.mark.parametrize("format_", ["jsonl", "csv"])
def test_columns_are_picked_by_name_ours_first(archive: Archive, format_: str) -> None:
    job = archive.job([{"text": "t0", "row": "mine", "input_tokens": "own"}])
    archive.answer(job, ok(0))
    wanted = ["text", "row", "output", "input_tokens"]

    (row,) = archive.table(job, columns=wanted) if format_ == "csv" else archive.lines(job, columns=wanted)

    assert list(row) == wanted
    assert list(map(str, row.values())) == ["t0", "0", "yes", "own"]


@pytest.mark.parametrize("format_", ["jsonl", "csv"])
def test_a_column_that_does_not_exist_is_refused_with_those_that_do(archive: Archive, format_: str) -> None:
    job = archive.job([{"text": "t0"}])
    archive.answer(job, ok(0))

    with pytest.raises(ConfigurationError, match=r"'txt'.*cost_usd.*text"):
        archive.export(job, format=format_, columns=["row", "txt"])


def test_later_rows_may_have_other_columns_than_the_first(archive: Archive) -> None:
    job = archive.job([{"a": 1}, {"b": 2}])
    archive.answer(job, ok(0), ok(1))

    assert [r["a"] for r in archive.table(job)] == ["1", ""]


def test_an_unknown_format_is_refused(archive: Archive) -> None:
    job = archive.job(texts(1))

    with pytest.raises(ConfigurationError, match="'xml'"):
        archive.export(job, format="xml")


def test_a_job_without_results_gives_a_csv_of_a_header(archive: Archive) -> None:
    job = archive.job(texts(1))

    assert archive.export(job, format="csv").decode().startswith("row,custom_id,status,")
    assert archive.table(job) == []


def test_the_number_of_rows_is_answered(archive: Archive) -> None:
    job = archive.job(texts(5))
    archive.answer(job, *(ok(n) for n in range(5)))

    counts = [write_results(archive.database, job.id, io.BytesIO(), format=f) for f in ("jsonl", "csv", "openai")]

    assert counts == [5, 5, 5]


# OpenAI batch output


def test_openai_lines_carry_answers_refusals_and_errors(archive: Archive) -> None:
    job = archive.job(texts(4))
    refused = ok(1, "No.", status=RowStatus.REFUSED)
    archive.answer(job, ok(0), refused, bad(2), ok(3, "cut", status=RowStatus.TRUNCATED, finish_reason="length"))

    answered, said_no, failed, cut = archive.lines(job, format="openai")

    message = answered["response"]["body"]["choices"][0]["message"]
    assert (answered["response"]["status_code"], message["content"], message["refusal"]) == (200, "yes", None)
    assert answered["response"]["body"]["usage"]["total_tokens"] == 43
    assert said_no["response"]["body"]["choices"][0]["message"]["refusal"] == "No."
    assert (failed["response"], failed["error"]) == (None, {"code": "timeout", "message": "slow"})
    assert cut["response"]["body"]["choices"][0]["finish_reason"] == "length"


def test_openai_lines_keep_the_custom_id(archive: Archive) -> None:
    job = archive.job([{"id": "a-7", "text": "t"}], id_column="id")
    archive.answer(job, ok(0))

    assert archive.lines(job, format="openai")[0]["custom_id"] == "a-7"


def test_openai_lines_carry_embeddings(archive: Archive) -> None:
    job = archive.job(texts(1), task=TaskKind.EMBED, prompt="{{ text }}")
    archive.answer(job, ok(0, None, embedding=struct.pack("<2f", 0.5, 1.0)))

    body = archive.lines(job, format="openai")[0]["response"]["body"]

    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]


def test_a_list_under_a_schema_is_no_embedding(archive: Archive) -> None:
    job = archive.job(texts(2), schema={})
    archive.answer(job, ok(0, "[]"), ok(1, "[0.5]"))

    contents = [x["response"]["body"]["choices"][0]["message"]["content"] for x in archive.lines(job, format="openai")]

    assert contents == ["[]", "[0.5]"]


# Memory


class Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def peak_bytes(archive: Archive, job: JobRecord) -> int:
    tracemalloc.start()
    try:
        write_results(archive.database, job.id, Nowhere())  # type: ignore[arg-type]  # writes are all it needs
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_flat_however_many_rows_are_written(archive: Archive) -> None:
    few = archive.job([{"text": "x" * 2000}] * 1000, chunk_size=500)
    many = archive.job([{"text": "x" * 2000}] * 6000, chunk_size=500)
    archive.database.run(lambda conn: steering.cancel(conn, few.id))
    archive.database.run(lambda conn: steering.cancel(conn, many.id))
    peak_bytes(archive, few)

    small, large = peak_bytes(archive, few), peak_bytes(archive, many)

    assert large < 1.3 * small
