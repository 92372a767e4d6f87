"""A mistake that shows before anything has to run is told before anything is made: the folder stays as it was."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import batchmill
from batchmill.asked import make_submission
from batchmill.cli import main
from batchmill_core.errors import UserError

TOML = """
[accounts.sim]
base_url = "http://127.0.0.1:9/v1"
[models.sim-chat]
account = "sim"
[models.priced]
account = "sim"
price = { input = 1, output = 2 }
"""
GOOD = ["data.jsonl", "-m", "sim-chat", "-p", "{{ text }}"]
# What is typed after the command, and what the one sentence says of it.
MISTAKES = {
    "model": (["data.jsonl", "-m", "sim-chta", "-p", "{{ text }}"], "did you mean 'sim-chat'?"),
    "no model": (["data.jsonl", "-p", "{{ text }}"], "no model is given"),
    "file": (["dta.jsonl", "-m", "sim-chat", "-p", "{{ text }}"], "did you mean data.jsonl?"),
    "folder": (["dat/a.jsonl", "-m", "sim-chat", "-p", "{{ text }}"], "there is no folder dat"),
    "pattern": (["*.csv", "-m", "sim-chat", "-p", "{{ text }}"], "no file matches *.csv"),
    "column": (["data.jsonl", "-m", "sim-chat", "-p", "{{ txt }}"], "did you mean 'text'?"),
    "column of the system": ([*GOOD, "-s", "{{ lagn }}"], "did you mean 'lang'?"),
    "messages column": (["data.jsonl", "-m", "sim-chat", "--messages-column", "texts"], "did you mean 'text'?"),
    "template": (["data.jsonl", "-m", "sim-chat", "-p", "{{ text"], "the prompt template, line 1"),
    "id column": ([*GOOD, "--id-column", "ids"], "there is no id column 'ids'"),
    "encoding": ([*GOOD, "--encoding", "utf-9"], "encoding 'utf-9' is not known"),
    "first line": (["bad.jsonl", "-m", "sim-chat", "-p", "{{ text }}"], "bad.jsonl line 1: not valid JSON"),
    "empty file": (["empty.jsonl", "-m", "sim-chat", "-p", "{{ text }}"], "empty.jsonl has no rows"),
    "nothing to ask": (["other.jsonl", "-m", "sim-chat"], "nothing says what to ask"),
    "parameter": ([*GOOD, "--param", "messages=1"], "messages"),
    "schema": ([*GOOD, "--schema", "schema.json"], "schema"),
    "task": ([*GOOD, "--task", "classify"], "needs a classification model"),
    "limit": ([*GOOD, "--limit", "0"], "the limit is 0"),
    "budget without a price": ([*GOOD, "--budget", "1"], "a budget needs a known price"),
    "budget without a bound": (
        ["data.jsonl", "-m", "priced", "-p", "{{ text }}", "--budget", "1"],
        "add --param max_tokens=N",
    ),
}
MISTAKES_OF_RESULTS = {
    "column of results": ([*GOOD, "-o", "o.csv", "--columns", "row,ouput"], "did you mean 'output'?"),
    "column of the input": ([*GOOD, "-o", "o.jsonl", "--columns", "row,txt"], "did you mean 'text'?"),
    "format": ([*GOOD, "-o", "o.foo"], "its suffix names no format"),
}
FILES = {
    "batchmill.toml": TOML,
    "data.jsonl": '{"text": "a", "lang": "en"}\n{"text": "b", "lang": "en"}\n',
    "bad.jsonl": "nonsense\n",
    "empty.jsonl": "",
    "other.jsonl": '{"n": 1}\n',
    "schema.json": json.dumps({"type": "shoe"}),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    ("command", "mistake"),
    [*((c, m) for c in ("run", "submit") for m in MISTAKES), *(("run", m) for m in MISTAKES_OF_RESULTS)],
)
def test_a_mistake_is_told_in_one_line_and_nothing_is_made(
    command: str, mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, words = {**MISTAKES, **MISTAKES_OF_RESULTS}[mistake]

    code = main([command, *typed])

    said = capsys.readouterr().err
    assert (code, said.count("\n")) == (2, 1)
    assert words in said
    assert left_in(folder) == set(FILES)


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_first_line_of_a_pipe_that_is_wrong_makes_nothing(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"nonsense\n")))

    code = main([command, "-", "-m", "sim-chat", "-p", "{{ text }}", "--eager"])

    assert code == 2
    assert "stdin line 1: not valid JSON" in capsys.readouterr().err
    assert left_in(folder) == set(FILES)


@pytest.mark.parametrize(
    "options", [{"model": "sim-chta"}, {"prompt": "{{ txt }}"}, {"id_column": "ids"}, {"dataset": "dta.jsonl"}]
)
def test_a_mistake_in_python_makes_nothing(options: dict[str, str], folder: Path) -> None:
    asked: dict[str, Any] = {"dataset": "data.jsonl", "model": "sim-chat", "prompt": "{{ text }}", **options}
    client = batchmill.connect(folder=folder)

    with contextlib.closing(client), pytest.raises(UserError):
        client.submit(make_submission(**asked))

    assert left_in(folder) == set(FILES)
