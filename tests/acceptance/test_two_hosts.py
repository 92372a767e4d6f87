"""README, "More than one machine": its commands, run on two hosts that share a broker and a database and nothing else."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from batchmill_db import jobs, verify
from batchmill_db.schema import worker
from batchmill_db.session import Database
from batchmill_ops.simulator import SimulatorConfig
from batchmill_ops.simulator.process import SimulatorHandle, simulated
from tests.integration.harness import until

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("batchmill")
SECTION = (ROOT / "README.md").read_text().partition("## More than one machine")[2].partition("\n## ")[0]
ROWS = 300
CATALOGUE = """
[accounts.openai]
base_url = "{url}"
api_key_env = "OPENAI_API_KEY"
max_in_flight = 6

[models."gpt-4.1-mini"]
account = "openai"
model = "sim-chat"
price = {{ input = 0.40, cached_input = 0.10, output = 1.60 }}
"""


def shown_commands() -> list[list[str]]:
    """The commands of the section's first block, without comments."""
    block = re.findall(r"```sh\n(.*?)```", SECTION, flags=re.DOTALL)[0].replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [line for line in lines if line and line[0] == "batchmill"]


class Host:
    """A folder with its own copy of the settings, an environment of its own, and what was started there."""

    def __init__(self, folder: Path, shared: Mapping[str, str], catalogue: str) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "batchmill.toml").write_text(catalogue)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        self._env = {**clean, **shared, "OPENAI_API_KEY": "sk-test-of-two-hosts"}
        self.worker: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str]) -> str:
        done = subprocess.run(
            [str(PROGRAM), *command[1:]],
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr}{self.log()}"
        return done.stdout

    def start(self, command: list[str]) -> None:
        with (self.folder / "worker.log").open("wb") as log:
            self.worker = subprocess.Popen(
                [str(PROGRAM), *command[1:]], cwd=self.folder, env=self._env, stdout=log, stderr=log
            )

    def log(self) -> str:
        path = self.folder / "worker.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def stop(self) -> int:
        """TERM, as a service manager sends it; answers the exit code."""
        assert self.worker is not None
        self.worker.send_signal(signal.SIGTERM)
        try:
            return self.worker.wait(40)
        finally:
            self.worker.kill()


class Hosts:
    """Two hosts, and the servers that both know."""

    def __init__(self, first: Host, second: Host, database: Database, provider: SimulatorHandle) -> None:
        self.first, self.second = first, second
        self.database = database
        self.provider = provider

    def workers(self) -> list[Any]:
        """The worker processes that are ready, with the calls that each has in flight."""
        with self.database.reading() as conn:
            return list(conn.execute(select(worker.c.pid, worker.c.in_flight).where(worker.c.state == "ready")).all())


@pytest.fixture
def hosts(tmp_path: Path, valkey_url: str, postgres_url: str) -> Iterator[Hosts]:
    shared = {"BATCHMILL_BROKER_URL": valkey_url, "BATCHMILL_DATABASE_URL": postgres_url}
    with ExitStack() as stack:
        provider = stack.enter_context(simulated(SimulatorConfig(latency_s=0.1)))
        catalogue = CATALOGUE.format(url=provider.base_url)
        first, second = (Host(tmp_path / name, shared, catalogue) for name in ("first", "second"))
        database = Database(postgres_url)
        stack.callback(database.close)
        for host in (first, second):
            stack.callback(lambda h=host: h.worker and h.worker.kill())
        yield Hosts(first, second, database, provider)


def test_there_are_five_commands() -> None:
    words = [command[1:3] for command in shown_commands()]

    assert [w[0] for w in words] == ["db", "worker", "submit", "watch", "results"]


@pytest.mark.slow
def test_two_hosts_that_share_two_addresses_grind_one_job(hosts: Hosts) -> None:
    upgrade, work, submit, watch, results = shown_commands()
    rows = "".join(json.dumps({"text": f"a great product, number {n}"}) + "\n" for n in range(ROWS))
    (hosts.first.folder / "reviews.jsonl").write_text(rows)
    hosts.first.run(upgrade)
    for host in (hosts.first, hosts.second):
        host.start(work)
    until("both hosts have a worker", lambda: len(hosts.workers()) == 2, timeout_s=60)
    job = hosts.first.run([*submit, "--chunk-size", "10"]).strip()
    until("both hosts are at it", lambda: [w.in_flight > 0 for w in hosts.workers()] == [True, True])
    for host, command in ((hosts.second, watch), (hosts.first, results), (hosts.second, results)):
        host.run([job if word == "JOB" else word for word in command])
    exits = [host.stop() for host in (hosts.first, hosts.second)]

    texts = [(host.folder / "labels.jsonl").read_text() for host in (hosts.first, hosts.second)]
    lines = [json.loads(line) for line in texts[0].splitlines()]
    assert texts[0] == texts[1]
    assert [line["row"] for line in lines] == list(range(ROWS))
    assert {line["status"] for line in lines} <= {"ok", "truncated"}
    assert exits == [0, 0]
    assert sum(Decimal(line["cost_usd"]) for line in lines) == Decimal(str(hosts.provider.bill()["cost_usd"]))
    with hosts.database.reading() as conn:
        assert verify.as_lines(verify.verify(conn, jobs.find(conn, job).id)) == []
