"""The command `gpus` on a folder with samples."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.cli import main
from batchmill.cli_gpus import parse_span
from batchmill_core.errors import ConfigurationError
from tests.device_samples import BUSY, STARVED, sampled
from tests.prepared_jobs import PreparedFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparedFolder]:
    monkeypatch.chdir(tmp_path)
    prepared = PreparedFolder(tmp_path)
    yield prepared
    prepared.database.close()


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["gpus", *arguments])
    heard = capsys.readouterr()
    assert code == 0, heard.err
    return heard.out


def test_how_devices_stand(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sampled(folder.database, BUSY, first_s=60)
    sampled(folder.database, STARVED, first_s=60, device="1")

    text = said(capsys, "--once")

    assert [line.split()[0] for line in text.splitlines() if "%" in line][:2] == ["0", "1"]
    assert "compute-bound" in text
    assert "→ raise gpu_slots in batchmill.toml (2 now)" in text


def test_how_devices_stand_as_json(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sampled(folder.database, STARVED, first_s=60)

    (device,) = json.loads(said(capsys, "--json"))

    assert (device["host"], device["device"], device["models"], device["workers"]) == ("node-a", "0", ["small"], ["gpu0@node-a"])  # fmt: skip
    assert (device["use_percent"], device["waiting"], device["bubble_share"]) == (9.0, 500.0, 0.6)
    assert (device["findings"][0]["verdict"], device["findings"][0]["alarm"]) == ("starved", True)


def test_a_report(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sampled(folder.database, BUSY, first_s=600)

    text = said(capsys, "--report", "--since", "10m")

    assert "device   0 on node-a · small by gpu0@node-a" in text
    assert "verdict  compute-bound" in text


def test_a_report_as_json(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    sampled(folder.database, STARVED, first_s=600)

    found: dict[str, Any] = json.loads(said(capsys, "--report", "--since", "10m", "--json"))

    (device,) = found["devices"]
    (alarm,) = device["alarms"]
    assert (found["since_s"], device["work_share"], alarm["verdict"], alarm["share"]) == (600.0, 1.0, "starved", 1.0)
    assert device["advice"][0]["advice"].startswith("raise gpu_slots")


def test_nothing_sampled_is_told(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no device was sampled" in said(capsys, "--once")
    assert "no device was sampled in the last 1 h" in said(capsys, "--report")
    assert json.loads(said(capsys, "--json")) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("5min", 300.0), ("1h", 3600.0), ("1.5 h", 5400.0), ("7d", 604_800.0)]
)  # fmt: skip
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_span(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0s", "-1h", "1 week", "h"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no length of time; write for example --since 30m, 1h or 7d"):
        parse_span(text)


def test_on_a_terminal_it_is_a_table_until_ctrl_c(folder: PreparedFolder) -> None:
    sampled(folder.database, BUSY, first_s=300)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "batchmill.cli", "gpus"],
        cwd=folder.path,
        env={**clean, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    drawn = b""
    while drawn.count(b"compute-bound") < 4:  # drawn twice: in the table, and with the advice
        drawn += os.read(ours, 65_536)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=30)
    os.close(ours)

    assert code == 0
    assert "█" in drawn.decode(errors="replace")


def test_without_a_terminal_it_is_lines_until_it_is_ended(folder: PreparedFolder) -> None:
    sampled(folder.database, BUSY, first_s=60)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    command = [sys.executable, "-P", "-m", "batchmill.cli", "gpus"]
    with subprocess.Popen(
        command, cwd=folder.path, env={**clean, "BATCHMILL_SAMPLE_EVERY_S": "0.1"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.terminate()

    assert all(" 0@node-a small " in line for line in lines)
