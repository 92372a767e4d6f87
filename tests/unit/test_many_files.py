"""Data sets of several files: folders, patterns and URLs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill_core.errors import ConfigurationError, PromptError, SourceError
from batchmill_core.request import Row
from batchmill_producers import source_urls
from batchmill_producers.prompts import compile_prompt
from batchmill_producers.source_files import job_name
from batchmill_producers.source_urls import public_url
from batchmill_producers.sources import open_source


def rows(dataset: Any, **options: Any) -> list[Row]:
    return list(open_source(dataset, **options))


def places(dataset: Any, **options: Any) -> list[tuple[str | None, int | None, Any]]:
    return [(r.source, r.line, r.input["a"]) for r in rows(dataset, **options)]


def refusal(dataset: Any, **options: Any) -> str:
    with pytest.raises((SourceError, ConfigurationError)) as caught:
        rows(dataset, **options)
    return str(caught.value)


def fill(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_name(path.name.replace("_", "."))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


# Folders and patterns


def test_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    fill(tmp_path, b_csv="a\n3\n", a_csv="a\n1\n2\n", c__d_csv="a\n4\n")

    assert places(tmp_path) == [("a.csv", 2, "1"), ("a.csv", 3, "2"), ("b.csv", 2, "3"), ("c/d.csv", 2, "4")]
    assert [r.index for r in rows(tmp_path)] == [0, 1, 2, 3]
    assert open_source(tmp_path).name == tmp_path.name


def test_files_that_are_no_data_are_left_out_of_a_folder(tmp_path: Path) -> None:
    fill(tmp_path, a_jsonl='{"a": 1}')
    for name in (".hidden", "_SUCCESS", ".ipynb_checkpoints/a.jsonl", "_temporary/0/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("no data")

    assert places(tmp_path) == [("a.jsonl", 1, 1)]


def test_pattern_takes_what_matches(tmp_path: Path) -> None:
    fill(tmp_path, x__a_jsonl='{"a": 1}', y__b_jsonl='{"a": 2}', y__b_csv="a\n9\n", z__deep__c_jsonl='{"a": 3}')

    assert places(f"{tmp_path}/*/*.jsonl") == [("x/a.jsonl", 1, 1), ("y/b.jsonl", 1, 2)]
    assert places(tmp_path / "**" / "*.jsonl")[-1] == ("z/deep/c.jsonl", 1, 3)
    assert places(f"{tmp_path}/y/b.[c]sv") == [("b.csv", 2, "9")]


def test_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text('{"a": 1}')

    assert places(tmp_path / "a[1].jsonl") == [("a[1].jsonl", 1, 1)]


def test_plain_and_compressed_files_of_one_format_go_together(tmp_path: Path) -> None:
    import gzip

    fill(tmp_path, a_jsonl='{"a": 1}', c_ndjson='{"a": 3}')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"a": 2}'))

    assert [a for _, _, a in places(tmp_path)] == [1, 2, 3]


def test_several_formats_are_refused_with_an_example_of_each(tmp_path: Path) -> None:
    fill(tmp_path, a_csv="a\n1\n", b_jsonl='{"a": 1}')

    assert refusal(tmp_path) == (
        "the data set has files of several formats: CSV (a.csv), JSON Lines (b.jsonl); "
        "name those of one, for example by a pattern: '*.csv'"
    )


def test_file_without_a_known_suffix_in_a_folder_says_how_to_leave_it_out(tmp_path: Path) -> None:
    fill(tmp_path, a_csv="a\n1\n", README_md="words")

    assert "README.md has no known suffix" in refusal(tmp_path)
    assert "name the files that are meant: 'folder/*.csv'" in refusal(tmp_path)


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"the folder {tmp_path} holds no data files"


def test_pattern_without_a_match_is_refused(tmp_path: Path) -> None:
    assert f"no file matches {tmp_path}/*.csv (looked from " in refusal(f"{tmp_path}/*.csv")
    assert f": there is no folder {tmp_path}/no (looked from " in refusal(f"{tmp_path}/no/*.csv")


def test_error_names_the_file_and_its_own_line(tmp_path: Path) -> None:
    fill(tmp_path, a_jsonl='{"a": 1}\n{"a": 2}\n', b_jsonl='{"a": 3}\nbroken\n')

    assert refusal(tmp_path).startswith(f"{tmp_path}/b.jsonl line 2: not valid JSON")


def test_rows_left_out_are_named_with_their_file(tmp_path: Path) -> None:
    fill(tmp_path, a_jsonl="broken", b_jsonl='{"a": 1}')
    source = open_source(tmp_path, skip_bad_rows=True)

    assert [r.source for r in source] == ["b.jsonl"]
    assert [(b.line, b.reason.partition(" ")[0]) for b in source.bad_rows] == [(1, "a.jsonl:")]


def test_files_without_rows_are_no_fault_where_others_have_some(tmp_path: Path) -> None:
    fill(tmp_path, a_jsonl="", b_jsonl='{"a": 1}')

    assert places(tmp_path) == [("b.jsonl", 1, 1)]


def test_id_that_is_in_two_files_names_both(tmp_path: Path) -> None:
    fill(tmp_path, a_csv="id\nx\ny\n", b_csv="id\ny\n")

    message = refusal(tmp_path, id_column="id")

    assert message.startswith(f"{tmp_path}/b.csv line 2: id 'y' was already on line 3 of a.csv; ids must be unique")


def test_template_error_names_the_file_that_lacks_the_column(tmp_path: Path) -> None:
    fill(tmp_path, a_csv="text,lang\nhi,en\n", b_csv="text\nhi\n")
    first, second = rows(tmp_path)
    prompt = compile_prompt("{{ lang }}: {{ text }}", columns=first.input)

    with pytest.raises(PromptError, match=r"row 1 \(b.csv line 2\).*columns here: text"):
        prompt.render(second)


def test_limit_ends_before_later_files_are_opened(tmp_path: Path) -> None:
    fill(tmp_path, a_jsonl='{"a": 1}', b_jsonl="broken")

    assert places(tmp_path, limit=1) == [("a.jsonl", 1, 1)]


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("reviews.jsonl.gz", "reviews"),
        ("data/2024/*.csv", "2024"),
        ("s3://bucket/key/reviews.parquet", "reviews"),
        ("s3://bucket/key/*.parquet", "key"),
        ("https://host/reviews.csv?token=secret", "reviews"),
        (".", Path.cwd().name),
        ("*.csv", Path.cwd().name),
    ],
)
def test_job_is_named_after_its_data(dataset: str, name: str) -> None:
    assert job_name(dataset) == name


# URLs


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def test_url_is_read_like_a_file(memory: Any) -> None:
    memory.pipe("/x/a.jsonl", b'{"a": 1}\n{"a": 2}\n')

    assert places("memory://x/a.jsonl") == [("a.jsonl", 1, 1), ("a.jsonl", 2, 2)]


def test_file_url_is_read(tmp_path: Path) -> None:
    fill(tmp_path, a_csv="a\n1\n")

    assert places(f"file://{tmp_path}/a.csv") == [("a.csv", 2, "1")]


def test_folders_and_patterns_work_behind_a_url(memory: Any) -> None:
    memory.pipe({"/x/b.jsonl": b'{"a": 2}', "/x/a/a.jsonl": b'{"a": 1}', "/x/_SUCCESS": b""})

    assert places("memory://x") == [("a/a.jsonl", 1, 1), ("b.jsonl", 1, 2)]
    assert places("memory://x/*.jsonl") == [("b.jsonl", 1, 2)]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_behind_a_url_are_read(memory: Any, suffix: str) -> None:
    table = pa.table({"a": [1, None]})
    with memory.open(f"/x/t.{suffix}", "wb") as out:
        if suffix == "parquet":
            pq.write_table(table, out)
        else:
            with pa.ipc.new_file(out, table.schema) as writer:
                writer.write_table(table)

    assert places(f"memory://x/t.{suffix}") == [(f"t.{suffix}", 1, 1), (f"t.{suffix}", 2, None)]


def test_nothing_at_a_url_says_so(memory: Any) -> None:
    assert refusal("memory://x/a.jsonl").startswith("no file at memory://x/a.jsonl")


def test_file_that_vanished_behind_a_url_is_named(memory: Any) -> None:
    memory.pipe("/x/a.jsonl", b'{"a": 1}')
    source = open_source("memory://x/a.jsonl")
    memory.rm("/x/a.jsonl")

    with pytest.raises(SourceError, match="no file at memory://"):
        list(source)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_file_system_that_fails_on_the_way_names_the_url(
    memory: Any, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    class VendorError(Exception):
        pass

    class Failing:
        closed = False

        def read(self, *_: int) -> bytes:
            raise VendorError("throttled")

        seek = tell = read

        def close(self) -> None: ...

    memory.pipe(f"/x/a.{suffix}", b"x" * 100)
    monkeypatch.setattr(type(memory), "open", lambda *_: Failing())

    assert f"memory:///x/a.{suffix} cannot be read: VendorError: throttled" == refusal(f"memory://x/a.{suffix}")


@pytest.mark.parametrize(
    ("url", "install"),
    [("s3://b/k.csv", "batchmill[s3]"), ("gs://b/k.csv", "batchmill[gcs]")],
)
def test_missing_file_system_names_the_extra(url: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, module, None)

    assert f"pip install '{install}'" in refusal(url)


def test_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)

    assert "memory:// data needs a library that is missing: pip install 'fsspec'" in refusal("memory://x/a.csv")


def test_unknown_scheme_is_named() -> None:
    assert refusal("nope://x/a.csv") == "nope://x/a.csv: fsspec knows no nope:// URLs"


@pytest.mark.parametrize(
    "url", ["ftp://me:hunter2@host/a.csv", "https://host/a.csv?X-Amz-Signature=hunter2", "https://host/a.csv#hunter2"]
)
def test_secrets_of_a_url_are_not_shown(url: str) -> None:
    assert "hunter2" not in public_url(url)
    assert "host/a.csv" in public_url(url)


def test_errors_of_a_web_address_keep_its_token_to_themselves() -> None:
    url = "https://127.0.0.1:9/a.csv?token=hunter2"

    message = refusal(url)

    assert (
        message.startswith("https://127.0.0.1:9/a.csv cannot be read: ")
        or message == "no file at https://127.0.0.1:9/a.csv"
    )
    assert "hunter2" not in message


def test_windows_drive_is_no_url() -> None:
    assert not source_urls.is_url("C:\\data\\a.csv")
    assert not source_urls.is_url("C:/data/a.csv")
