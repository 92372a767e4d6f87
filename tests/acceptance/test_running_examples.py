"""examples/*.py run as a user runs them: as they stand, and with the one line changed that asks a real provider."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill_ops.simulator import SimulatorConfig
from batchmill_ops.simulator.process import simulated
from tests.servers import free_port

ROOT = Path(__file__).parents[2]
KEY = "sk-test-of-the-examples"
ROWS = 80
PROGRAMS = sorted(p.name for p in (ROOT / "examples").glob("*.py") if "__main__" in p.read_text())

pytestmark = pytest.mark.slow


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy of the folder on a port of its own, with fewer reviews."""
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder, ignore=shutil.ignore_patterns(".batchmill", "__pycache__", "*.out.*"))
    toml = folder / "batchmill.toml"
    toml.write_text(toml.read_text().replace("8765", str(free_port())))
    reviews = (folder / "reviews.jsonl").read_text(encoding="utf-8").split("\n")[:ROWS]
    (folder / "reviews.jsonl").write_text("\n".join(reviews) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def provider(examples: Path) -> Iterator[None]:
    """What the examples take for OpenAI: it wants a key, and knows only its own models."""
    with simulated(SimulatorConfig(latency_s=0.01, api_key=KEY)) as made:
        toml = examples / "batchmill.toml"
        text = toml.read_text().replace("https://api.openai.com/v1", made.base_url)
        for name, model in (("gpt-4.1-mini", "sim-chat"), ("text-embedding-3-small", "sim-embed")):
            text = text.replace(
                f'[models."{name}"]', f'[models."{name}"]\nmodel = "{model}"\nprice = {{ input = 1, output = 2 }}'
            )
        toml.write_text(text)
        yield


def run(examples: Path, program: str, *arguments: str, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
    done = subprocess.run(
        [sys.executable, f"examples/{program}", *arguments],
        cwd=examples.parent,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def spent(examples: Path, by: str) -> list[dict[str, Any]]:
    """What stands in the ledger of the examples' folder."""
    command = [sys.executable, "-m", "batchmill.cli", "costs", "--by", by, "--json"]
    done = subprocess.run(command, cwd=examples, capture_output=True, text=True, timeout=60, check=True)
    lines: list[dict[str, Any]] = json.loads(done.stdout)
    return lines


def with_the_real_model(examples: Path, program: str) -> None:
    """Changes the line ``MODEL = "sim-…"  # or X, …`` to ``MODEL = X``."""
    path = examples / program
    changed, count = re.subn(r"^MODEL = .*?# or (\S+?), .*$", r"MODEL = \1", path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(changed)


def test_classify_labels_every_review_within_its_schema(examples: Path) -> None:
    said = run(examples, "classify.py")

    assert "60 of 60 reviews keep the schema" in said
    assert re.search(r"^positive +\d+ +4\.\d stars on average", said, re.MULTILINE)


def test_similar_finds_a_review_by_its_own_words_and_asks_for_stored_vectors_no_more(examples: Path) -> None:
    text = json.loads((examples / "reviews.jsonl").read_text(encoding="utf-8").splitlines()[3])["text"]

    first, second = (run(examples, "similar.py", text) for _ in range(2))

    assert first == second
    assert f"{ROWS} vectors of 512 dimensions" in first
    assert first.splitlines()[1].startswith("1.00  ")
    assert len(spent(examples, "job")) == 3  # the vectors once, the question twice


def test_openai_batch_writes_the_file_that_the_endpoint_would(examples: Path) -> None:
    said = run(examples, "openai_batch.py")

    asked = [json.loads(line)["custom_id"] for line in (examples / "openai_batch.jsonl").read_text().splitlines()]
    answered = [json.loads(line) for line in (examples / "openai_batch.out.jsonl").read_text().splitlines()]
    assert [a["custom_id"] for a in answered] == asked
    assert {a["response"]["status_code"] for a in answered} == {200}
    assert said.startswith(
        "batchmill run openai_batch.jsonl -o openai_batch.out.jsonl --format openai --model sim-chat\n"
    )


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_line_and_a_key_ask_a_real_provider(program: str, examples: Path) -> None:
    with_the_real_model(examples, program)

    run(examples, program, OPENAI_API_KEY=KEY)

    assert [line["account"] for line in spent(examples, "account")] == ["openai"]


def test_every_example_is_in_the_readme_of_the_folder() -> None:
    readme = (ROOT / "examples" / "README.md").read_text()
    files = {p.name for p in (ROOT / "examples").iterdir() if p.is_file() and not p.name.startswith(".")} - {
        "README.md"
    }

    assert {f for f in files if ".out." not in f} <= set(re.findall(r"`([a-z_]+\.[a-z]+)`", readme))
    assert set(re.findall(r"python examples/([a-z_]+\.py)", readme)) == set(PROGRAMS)
