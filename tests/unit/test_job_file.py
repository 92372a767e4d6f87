"""Job files: the same keys as the options, checked, and overridden by the command line."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchmill.cli import main
from batchmill.cli_run import run_command
from batchmill.job_file import KEYS, with_job_file
from batchmill.options import submission_of
from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus
from tests.prepared_jobs import PreparedFolder

CATALOGUE = """
[accounts.sim]
base_url = "http://127.0.0.1:9/v1"
[models.sim-chat]
account = "sim"
price = { input = 0.40, output = 1.60 }
"""
OPTIONS = ["dataset", "model", "prompt", "prompt_file", "system", "param", "schema", "budget", "output", "columns"]


def filled(path: Path, text: str, *given: str, **options: Any) -> dict[str, Any]:
    """What the options become; those named in ``given`` or with a value here stand on the command line."""
    path.write_text(text)
    values = {**dict.fromkeys(OPTIONS), "dataset": str(path), **options}
    return with_job_file(values, is_given=lambda name: name in given or name in options)


def refusal(path: Path, text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        filled(path, text)
    return str(caught.value)


def test_keys_are_the_options_of_run() -> None:
    options = {*inspect.signature(submission_of).parameters, *inspect.signature(run_command).parameters}

    assert {*KEYS} - {"params"} == options - {"param", "submission", "as_json"}


def test_paths_are_relative_to_the_file_and_urls_are_not_paths(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    text = 'dataset = "data/*.csv"\nprompt_file = "p.txt"\nschema = "/s.json"\noutput = "out.csv"\n'

    found = filled(job, text)

    assert found["dataset"] == str(tmp_path / "data/*.csv")
    assert found["prompt_file"] == tmp_path / "p.txt"
    assert found["schema"] == Path("/s.json")
    assert found["output"] == str(tmp_path / "out.csv")
    assert filled(job, 'dataset = "s3://b/k.csv"\noutput = "-"')["dataset"] == "s3://b/k.csv"
    assert filled(job, 'dataset = "-"\noutput = "-"')["output"] == "-"


def test_the_command_line_overrides(tmp_path: Path) -> None:
    text = 'dataset = "d.csv"\nmodel = "a"\nprompt_file = "p.txt"\n[params]\nmax_tokens = 8\nstop = ["7", "x"]\nuser = "7"\n'

    found = filled(tmp_path / "job.toml", text, model="b", prompt="Label", param=["max_tokens=9"])

    assert (found["model"], found["prompt"], found["prompt_file"]) == ("b", "Label", None)
    assert found["param"] == ['stop=["7", "x"]', 'user="7"', "max_tokens=9"]


def test_numbers_and_lists_become_what_the_options_take(tmp_path: Path) -> None:
    found = filled(tmp_path / "job.toml", 'dataset = "d.csv"\nbudget = 0.1\ncolumns = ["row", "output"]')

    assert (found["budget"], found["columns"]) == ("0.1", "row,output")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('dataset = "d"\nprompt-file = "x"', ": prompt-file is not a key of a job file; did you mean 'prompt_file'?"),
        ('dataset = "d"\nmodle = "x"', ": modle is not a key of a job file; did you mean 'model'?"),
        ('dataset = "d"\nzzz = 1', ": zzz is not a key of a job file; known: budget, chunk_size, "),
        ('model = "x"', ": dataset is missing; add it"),
        ('dataset = "d"\nlimit = "5"', ": limit is '5'; it must be a valid integer"),
        ('dataset = "d"\npriority = 12', ": priority is 12; it must be less than or equal to 9"),
        ('dataset = "d"\nparams = 5', ": params is 5; it must be a table"),
        ('dataset = "d"\nformat = "xls"', ": format is 'xls'; it must be 'jsonl', 'csv', 'parquet' or 'openai'"),
        ('dataset = "d"\nprompt = "a"\nprompt_file = "b"', ": prompt and prompt_file are both there; keep one of them"),
        ('dataset = "d"\n[params]\nat = 2024-01-01', ": params.at holds what JSON cannot: "),
        ("dataset = ", " is not valid TOML: "),
    ],
)
def test_mistake_names_the_file_and_the_key(tmp_path: Path, text: str, reason: str) -> None:
    assert f"{tmp_path / 'job.toml'}{reason}" in refusal(tmp_path / "job.toml", text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "batchmill.toml").write_text(CATALOGUE)
    (tmp_path / "jobs" / "d.csv").write_text("text\na\nb\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_file_runs_through_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'dataset = "d.csv"\nmodel = "sim-chat"\nprompt = "Label: {{ text }}"\noutput = "out.csv"\nlimit = 2\n'
    (folder / "jobs" / "job.toml").write_text(text + "[params]\nmax_tokens = 8\n")

    assert main(["estimate", "jobs/job.toml", "--json", "--limit", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1
    assert main(["estimate", "jobs/job.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2


def test_a_missing_job_file_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "nowhere.toml"]) == 2

    assert "the job file nowhere.toml cannot be read: No such file" in capsys.readouterr().err


def test_results_are_written_as_parquet_by_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prepared = PreparedFolder(tmp_path)
    job = prepared.done((RowStatus.OK, RowStatus.FAILED) * 2)
    prepared.database.close()

    assert main(["results", job.public_id, "-o", "out.parquet", "--columns", "row,status", "--status", "failed"]) == 0
    assert pq.read_table("out.parquet").to_pylist() == [{"row": n, "status": "failed"} for n in (1, 3)]
    assert main(["results", job.public_id, "-o", "out.parquet", "--excel-safe"]) == 2
    assert "--excel-safe is for CSV" in capsys.readouterr().err
