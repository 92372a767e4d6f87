"""A source that fails half-way leaves no job at all, and the same key starts afresh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill_core.errors import UserError
from batchmill_core.job import JobState
from batchmill_db import jobs
from batchmill_db.session import Database
from batchmill_producers.submit import Submission, submit
from tests.mill import MODEL, catalog_for, new_database, settings_for

N_ROWS = 40


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = new_database(tmp_path)
    yield found
    found.close()


def submitted(database: Database, folder: Path, dataset: Any, **options: Any) -> jobs.JobRecord:
    wanted = Submission(dataset=dataset, model=MODEL, prompt="{{ a }}", chunk_size=2, key="k", **options)
    return submit(database, settings_for(folder, catalog_for()), wanted)


def damaged_parquet(folder: Path) -> Any:
    path = folder / "r.parquet"
    pq.write_table(pa.table({"a": ["x" * 50] * N_ROWS}), path, row_group_size=N_ROWS // 2, compression="snappy")
    at = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = at.dictionary_page_offset or at.data_page_offset
    data[start : start + at.total_compressed_size] = b"\xff" * at.total_compressed_size
    path.write_bytes(data)
    return path


def vanishing_file(folder: Path) -> Any:
    (folder / "d").mkdir()
    (folder / "d" / "a.jsonl").write_text('{"a": 1}\n' * N_ROWS)
    (folder / "d" / "b.jsonl").symlink_to(folder / "nowhere.jsonl")
    (folder / "nowhere.jsonl").write_text('{"a": 1}\n')
    return folder / "d"


def failing_iterable(folder: Path) -> Any:
    def rows() -> Iterator[dict[str, int]]:
        for n in range(N_ROWS):
            yield {"a": n}
        raise ConnectionError("the database went away")

    return rows()


def failing_url(folder: Path) -> Any:
    memory = fsspec.filesystem("memory")
    memory.pipe("/half/a.jsonl", b'{"a": 1}\n' * N_ROWS)
    memory.pipe("/half/b.jsonl", b"\xff\xfe")
    return "memory://half"


def column_missing_in_a_later_file(folder: Path) -> Any:
    (folder / "c").mkdir()
    pq.write_table(pa.table({"a": [1] * N_ROWS}), folder / "c" / "1.parquet")
    pq.write_table(pa.table({"b": [1]}), folder / "c" / "2.parquet")
    return folder / "c" / "*.parquet"


SOURCES = [damaged_parquet, vanishing_file, failing_iterable, failing_url, column_missing_in_a_later_file]


@pytest.mark.parametrize("make", SOURCES, ids=[m.__name__ for m in SOURCES])
def test_a_job_is_refused_as_a_whole_and_its_key_begins_afresh(
    database: Database, tmp_path: Path, make: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make(tmp_path)
    if make is vanishing_file:
        monkeypatch.setattr(Path, "is_file", lambda _: True)  # it was there when the folder was listed
        (tmp_path / "nowhere.jsonl").unlink()

    with pytest.raises(UserError):
        submitted(database, tmp_path, dataset)

    with database.reading() as conn:
        assert jobs.newest(conn) == []
    again = submitted(database, tmp_path, [{"a": 1}])
    assert (again.state, again.n_rows) == (JobState.OPEN, 1)
