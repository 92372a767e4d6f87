"""The command line as a whole: help, version, refusals in one line, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill.cli import main
from batchmill.time_spans import parse_seconds


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    assert re.fullmatch(r"batchmill \d+\.\d+\.\d+\n", capsys.readouterr().out)


MISTAKES = {
    "nosuch": "No such command 'nosuch'. (see `batchmill --help`)",
    "run": "Missing argument 'DATASET'. (see `batchmill run --help`)",
    "run data.jsonl --foo": "No such option: --foo",
    "run data.jsonl -m x -p y --param z": "--param 'z' is not name=value; write for example --param max_tokens=64",
    "run data.jsonl -m x -p y --param a=1 --param a=2": "--param a is given twice; keep one of them",
    "run data.jsonl -m x -p y --budget much": "the budget 'much' is not an amount of USD; write USD, such as 5 or 0.50",
    "run data.jsonl -m x -p y --prompt-file z": "--prompt and --prompt-file are both given; keep one of them",
    "run data.jsonl -m x --prompt-file z": "--prompt-file z cannot be read: No such file or directory",
    "run data.jsonl -m x -p y -o nowhere/x.csv": "--output nowhere/x.csv: the folder nowhere does not exist",
    "run data.jsonl -m x -p y -o x.foo": "--output x.foo: its suffix names no format; add --format jsonl, csv, parquet or openai",
    "run data.jsonl -m x -p y -o .": "--output . is a folder; give the name of a file",
    "run data.jsonl -m x -p y -o - --json": "--json and -o - would both write to standard output; keep one of them",
    "run data.jsonl -m x -p y --format csv": "--format and --columns are for results; add -o OUT",
    "estimate data.jsonl -m x -p y": "no file data.jsonl",
    "show x": "there are no jobs in",
    "watch x --give-up-after soon": "--give-up-after 'soon' is not a length of time; write for example 30s, 10m or 2h",
    "costs --by shoe": "'shoe' is not one of 'model', 'job', 'day', 'account', 'worker'",
    "costs --by modle": "'worker'. Did you mean 'model'? (see `batchmill costs --help`)",
    "rnu data.jsonl": "No such command 'rnu'. Did you mean 'run'?",
    "worker gpuu": "No such command 'gpuu'. Did you mean 'gpu'?",
    "run data.jsonl --modle x": "No such option: --modle Did you mean --model or --name?",
    "results x --status fialed": "there is no status 'fialed'; did you mean 'failed'?",
    "simulate --latency soon": "latency 'soon' is not a duration",
    "worker gpu --model x": "model 'x' is not in the catalogue",
    "worker api": "no account is configured whose key is to be had",
    "doctor --verify x": "there are no jobs in",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(command.split())

    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("batchmill: ")
    assert MISTAKES[command] in said.err
    assert said.err.count("\n") == 1


def test_a_command_group_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker"]) == 2

    said = capsys.readouterr()
    assert "gpu" in said.out + said.err
    assert "batchmill: " not in said.err


def test_a_wrong_setting_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batchmill.toml").write_text("broker = 'redis://x'\n")

    assert main(["jobs"]) == 2
    assert "did you mean 'broker_url'?" in capsys.readouterr().err


def test_a_database_that_is_away_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("batchmill.opening._PATIENCE_S", 0.1)
    monkeypatch.setenv("BATCHMILL_DATABASE_URL", "postgresql://somebody:sesame@127.0.0.1:1/none")

    assert main(["jobs"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "batchmill: the database at postgresql+psycopg://somebody:***@127.0.0.1:1/none does not answer"
    )
    assert "sesame" not in said


def test_an_sqlite_file_in_no_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCHMILL_DATABASE_URL", f"sqlite:///{tmp_path}/nowhere/x.db")

    assert main(["jobs"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/nowhere/x.db cannot be opened: unable to open database file; does its folder exist?" in said


def test_help_loads_neither_celery_nor_the_workers() -> None:
    look = "import sys; import batchmill.cli as c; c.main(['--help']); print(*(m for m in sys.modules))"

    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.split()

    assert not {"celery", "aiohttp", "requests", "batchmill_workers.launch"} & set(loaded)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("30s", 30), ("1.5m", 90), ("2 h", 7200), ("1D", 86_400), ("0s", 0)]
)
def test_lengths_of_time_are_read_with_their_units(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--give-up-after") == seconds
