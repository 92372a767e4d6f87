"""docs/guide.md is true: every command, file, query and Python block of it is run, and what it shows is what comes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import text

from batchmill_db.session import Database
from tests.guide_page import GUIDE, ROOT, blocks, commands, is_typed_here, script, shown
from tests.servers import free_port

PROGRAMS = Path(sys.executable).parent
TIMEOUT_S = 500
_PORTS = ("8765", "8766")

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)  # whichever test is first waits for all of it


class Typed:
    """What came of typing the page: what each block printed, by its number, and which commands ended otherwise."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder = folder
        self._out = out
        self.failures = (out / "failures").read_text() if (out / "failures").exists() else ""
        self._ids = frozenset(re.findall(r'"job_id": "(\w+)"', (out / "jobs").read_text()))

    def printed(self, number: int) -> str:
        return (self._out / str(number)).read_text(errors="replace")

    def lines(self, number: int) -> set[str]:
        """What a block printed, without what differs from run to run."""
        return set(shown(self.printed(number), ids=self._ids))


def _environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("BATCHMILL_", "FLOWER_", "OPENAI_"))}
    return {**clean, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", **more}


def _run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=_environment(**env), capture_output=True, text=True, timeout=60, check=True
    )


@contextmanager
def shell(typed: str, folder: Path, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that runs the text, in a session of its own that ends with it."""
    (out / "script.sh").write_text(typed)
    process = subprocess.Popen(
        ["bash", str(out / "script.sh")], cwd=folder, env=_environment(GUIDE_OUT=str(out)), start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Typed:
    """The whole page, typed once."""
    home, out = tmp_path_factory.mktemp("guide"), tmp_path_factory.mktemp("out")
    shutil.copytree(ROOT / "examples", home / "examples", ignore=shutil.ignore_patterns(".batchmill"))
    with request.getfixturevalue("postgres_server").database() as database_url:
        page = script().replace("postgresql+psycopg://batchmill:PASSWORD@HOST/batchmill", database_url)
        page = page.replace("redis://:PASSWORD@HOST:6379/0", request.getfixturevalue("_valkey").url)
        page = page.replace("batchmill up\n", "batchmill up --flower-port 0\n")
        for port in _PORTS:
            page = page.replace(port, str(free_port()))
        with shell(page, home, out) as process:
            try:
                process.wait(TIMEOUT_S)
            finally:
                _run(["batchmill", "down"], home / "mill", {})
    return Typed(home / "mill", out)


@pytest.mark.slow
def test_every_command_ends_as_the_page_says(typed: Typed) -> None:
    printed = "".join(typed.printed(n) for n, b in enumerate(blocks()) if b.language in ("sh", "python"))

    assert typed.failures == "", printed[-6000:]


@pytest.mark.slow
def test_what_the_page_shows_is_what_comes(typed: Typed) -> None:
    pairs = [(n - 1, b.text) for n, b in enumerate(blocks()) if b.language == "text"]
    missing = {n: [line for line in shown(text) if line not in typed.lines(n)] for n, text in pairs}

    assert {n: (lines, sorted(typed.lines(n))) for n, lines in missing.items() if lines} == {}


@pytest.mark.slow
def test_the_python_block_answers_both_rows(typed: Typed) -> None:
    [number] = [n for n, b in enumerate(blocks()) if b.language == "python"]

    assert re.findall(r"^(Paris|Rome) ok \w+$", typed.printed(number), re.MULTILINE) == ["Paris", "Rome"]


@pytest.mark.slow
def test_the_query_answers_with_every_job(typed: Typed) -> None:
    [query] = blocks("sql")
    database = Database(f"sqlite:///{typed.folder / '.batchmill' / 'batchmill.db'}")
    with database.reading() as conn:
        rows = conn.execute(text(query.text)).all()
    database.close()

    assert {"reviews", "capped", "night", "moods"} <= {row.name for row in rows}
    assert all(row.usd is not None for row in rows)


def test_what_is_not_typed_here_names_what_is_there() -> None:
    skipped = [shlex.split(c) for b in blocks("sh") for c in commands(b.text) if not is_typed_here(c)]
    make = {words[1] for words in skipped if words[0] == "make"}
    compose = [words[2:] for words in skipped if words[0] == "docker"]
    services = set(re.findall(r"^  ([a-z]+):", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE))

    assert make <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {w.partition("=")[0] for words in compose for w in words if "=" in w} <= services
    assert all((ROOT / words[1]).is_file() for words in skipped if words[0] == "cp")
    assert {words[0] for words in skipped} == {"make", "source", "docker", "sudo", "cp"}


def test_every_exit_code_is_in_the_table() -> None:
    assert re.findall(r"^\| (\d+) \|", GUIDE, re.MULTILINE) == ["0", "1", "2", "3", "130"]
