"""Failpoints kill their process with SIGKILL, at the passing that was asked for, and otherwise do nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import batchmill_workers
from batchmill_workers.failpoints import FAILPOINTS, VARIABLE, failpoint

PROGRAM = """
from batchmill_workers.failpoints import failpoint
for n in range(3):
    failpoint("after_claim")
    failpoint("after_call")
    print(n, flush=True)
"""


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != VARIABLE} | ({} if value is None else {VARIABLE: value})
    return subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("value", "passed"),
    [("after_call", ""), ("after_call:1", ""), ("after_call:3", "0\n1\n"), ("after_claim:2", "0\n")],
)
def test_the_process_dies_at_the_passing_that_was_asked_for(value: str, passed: str) -> None:
    ended = run(value)

    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, passed)


@pytest.mark.parametrize("value", [None, "", "before_commit", "after_call:4"])
def test_the_process_lives_where_it_passes_no_failpoint_of_that_name_so_often(value: str | None) -> None:
    ended = run(value)

    assert (ended.returncode, ended.stdout) == (0, "0\n1\n2\n")


def test_a_name_that_does_not_exist_is_refused_with_those_that_do() -> None:
    ended = run("after_lunch")

    assert ended.returncode == 1
    assert "after_lunch" in ended.stderr
    assert all(name in ended.stderr for name in FAILPOINTS)


def test_in_this_process_nothing_happens() -> None:
    for name in FAILPOINTS:
        failpoint(name)


def test_every_failpoint_stands_on_the_way_of_a_row_exactly_once() -> None:
    folder = Path(batchmill_workers.__file__ or "").parent
    code = "".join(p.read_text() for p in folder.glob("*.py"))

    assert sorted(re.findall(r'failpoint\("(\w+)"\)', code)) == sorted(FAILPOINTS)
