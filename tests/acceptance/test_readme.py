"""What README.md shows is what the code does: every command, example and query in it is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from batchmill_core.settings import load_settings
from batchmill_db.session import Database
from batchmill_ops.simulator import SimulatorConfig, parse_faults
from batchmill_ops.simulator.process import simulated
from tests.integration.harness import milling

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAM = Path(sys.executable).with_name("batchmill")
CATALOGUE = """
[accounts.sim]
base_url = "{url}"

[models.sim-chat]
account = "sim"
price = {{ input = 0.40, output = 1.60 }}

[models."gpt-4.1-mini"]
account = "sim"
model = "sim-chat"
price = {{ input = 0.40, output = 1.60 }}
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A user's folder with a provider behind its catalogue and some reviews in it."""
    (tmp_path / "examples").mkdir()
    reviews = (ROOT / "examples" / "reviews.jsonl").read_text().splitlines(keepends=True)[:30]
    for place in (tmp_path / "examples" / "reviews.jsonl", tmp_path / "reviews.jsonl"):
        place.write_text("".join(reviews))
    with simulated(SimulatorConfig(latency_s=0.02)) as provider:
        (tmp_path / "batchmill.toml").write_text(CATALOGUE.format(url=provider.base_url))
        yield tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=200, check=False)


def test_the_first_job_runs_as_shown(folder: Path) -> None:
    shown = next(b for b in blocks("sh") if "batchmill run" in b)
    command = shlex.split(shown.replace("\\\n", " "))

    ran = run([str(PROGRAM), *command[1:]], folder)

    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (folder / "labels.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(30))
    assert {line["status"] for line in lines} <= {"ok", "truncated"}


def test_the_python_example_runs_as_shown(folder: Path) -> None:
    (folder / "example.py").write_text(blocks("python")[0])

    ran = run([sys.executable, "example.py"], folder)

    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 31
    assert "settled" in ran.stdout.splitlines()[-1]


def test_the_catalogue_shown_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "batchmill.toml").write_text(blocks("toml")[0])

    settings = load_settings(tmp_path, {})

    assert set(settings.catalog.models) == {"gpt-4.1-mini", "smollm2"}


@pytest.mark.parametrize("number", range(5))
def test_each_query_answers_on_a_real_job(number: int, finished_job: Database) -> None:
    query = blocks("sql")[number]

    with finished_job.reading() as conn:
        rows = conn.execute(text(query)).all()

    assert rows, "the query found nothing"


def test_there_are_five_queries() -> None:
    assert len(blocks("sql")) == 5


@pytest.fixture
def finished_job(tmp_path: Path, valkey_url: str, database_url: str) -> Iterator[Database]:
    """The database of a job that met faults, some rows failed for good."""
    faults = parse_faults("500:0.1,400:0.2")
    with milling(
        tmp_path,
        broker_url=valkey_url,
        database_url=database_url,
        provider=SimulatorConfig(latency_s=0.01, faults=faults),
    ) as mill:
        mill.start_worker()
        job = mill.submit(60)
        mill.wait_done(job, timeout_s=60)
        yield mill.database


def test_the_commands_of_the_table_are_the_commands_there_are(tmp_path: Path) -> None:
    table = README.split("| command | does |")[1].split("\n\n")[0]
    named = set(
        re.findall(r"`([a-z]+)(?: [a-z]+)?`", " ".join(row.split("|")[1] for row in table.splitlines() if "|" in row))
    )

    shown = run([str(PROGRAM), "--help"], tmp_path).stdout

    listed = set(re.findall(r"^│ ([a-z]+) ", shown, flags=re.MULTILINE))
    assert named == listed


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    assert set(re.findall(r"\bmake ([a-z]+)", README)) <= targets


@pytest.mark.slow
def test_make_run_does_the_main_job(tmp_path: Path) -> None:
    """What `make run` runs once everything is installed, in a folder of its own."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")

    ran = run([sys.executable, "-m", "batchmill.demo"], tmp_path)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "614 ok" in ran.stdout
    assert "gpu.smollm2" in ran.stdout
