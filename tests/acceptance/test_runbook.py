"""ops/runbook.md: its commands are run where they can be, and what the others name is there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from batchmill.cli import main
from batchmill_core.settings import Settings
from batchmill_ops.simulator import SimulatorConfig, parse_faults
from tests.integration.harness import Mill, milling

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "ops" / "runbook.md").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()
UNITS = ROOT / "ops" / "systemd"
PROGRAM = Path(sys.executable).with_name("batchmill")
KILL_AFTER_S = 10  # how much longer than drain_s the supervisor waits before it kills
SITUATIONS = ["Start", "Scale", "Upgrade", "Drain a host", "Broker lost", "Database lost", "Account stopped"]
SITUATIONS += ["Poison rows", "Disk full"]


def commands(program: str) -> list[list[str]]:
    """The commands of one program, in the order of the page."""
    blocks = re.findall(r"```sh\n(.*?)```", RUNBOOK, flags=re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line[0] == program]


@pytest.fixture
def mill(tmp_path: Path, valkey_url: str, postgres_url: str) -> Iterator[Mill]:
    """A team's mill with one job, some rows of which the provider refuses."""
    provider = SimulatorConfig(latency_s=0.01, faults=parse_faults("400:0.3"))
    with milling(tmp_path, broker_url=valkey_url, database_url=postgres_url, provider=provider) as made:
        yield made


@pytest.mark.slow
def test_each_command_of_ours_does_something(
    mill: Mill, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page: the job is worked on only before `results`, so that it can be paused until then."""
    monkeypatch.chdir(mill.home)
    job = mill.submit(20)
    for command in commands("batchmill"):
        if command[1] == "results" and not mill.workers:
            mill.start_worker()
            mill.wait_done(job)

        exit_code = main([job.public_id if word == "JOB" else word for word in command[1:]])

        no_worker_yet = command[1] == "doctor" and not mill.workers  # which is what it says
        assert exit_code in (0, 1, 3 if no_worker_yet else 0), (
            f"{' '.join(command)} ended with {exit_code}: {capsys.readouterr().err}"
        )
        if command[1] == "retry":
            mill.wait_done(job)


def test_each_query_answers(mill: Mill) -> None:
    job = mill.submit(20)
    mill.start_worker()
    mill.wait_done(job)
    queries = re.findall(r"```sql\n(.*?)```", RUNBOOK, flags=re.DOTALL)
    with mill.database.reading() as conn:
        answers = [conn.execute(text(query)).all() for query in queries]

    assert len(answers) == 3
    assert all(answers)


def test_services_and_units_that_it_names_are_there() -> None:
    services = set(re.findall(r"^  ([a-z]+):", COMPOSE.partition("\nservices:")[2], flags=re.MULTILINE))
    stopped = {
        word for c in commands("docker") for word in c[2:] if word in ("api", "redis", "postgres", "flower", "gpu")
    }
    units = {word.partition("@")[0] for c in commands("systemctl") for word in c if word.startswith("batchmill-")}

    assert stopped <= services
    assert units <= {path.name.partition("@")[0] for path in UNITS.iterdir()}


def test_every_situation_has_its_section() -> None:
    assert re.findall(r"^## (.*)", RUNBOOK, flags=re.MULTILINE) == SITUATIONS


def test_what_systemd_is_told_is_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    for unit in UNITS.glob("*.service"):  # it looks for the programs that units start
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/batchmill/bin/batchmill", str(PROGRAM)))
    names = ["batchmill-worker@api.service", "batchmill-flower.service"]
    (tmp_path / names[0]).symlink_to(tmp_path / "batchmill-worker@.service")

    said = subprocess.run(
        [analyze, "verify", *(str(tmp_path / n) for n in names)], capture_output=True, text=True, check=False
    )

    assert (said.returncode, said.stderr) == (0, "")


def test_a_worker_is_told_to_drain_by_its_main_process_alone_and_given_the_time() -> None:
    unit = (UNITS / "batchmill-worker@.service").read_text()
    waits_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, flags=re.MULTILINE)[0])
    grace_s = int(re.findall(r"stop_grace_period: (\d+)s", COMPOSE)[0])

    assert "KillMode=mixed" in unit
    assert "KillSignal=SIGTERM" in unit
    assert min(waits_s, grace_s) > Settings().drain_s + KILL_AFTER_S
