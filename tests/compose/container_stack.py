"""docker-compose.yml as a team runs it: jobs from the host, more workers, a container killed, another stopped."""

from __future__ import annotations

import base64
import json
import os
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import select

from batchmill_db import jobs, telemetry
from batchmill_db.jobs import JobRecord
from batchmill_db.schema import call
from batchmill_db.telemetry import WorkerRecord
from tests.compose.engine import Project, Provider, run
from tests.integration.harness import PROMPT, Mill, until
from tests.servers import free_port

ROWS = 1000
MODELS = """
[accounts.sim]
base_url = "http://simulator:8080/v1"
max_in_flight = 8

[models.sim-chat]
account = "sim"
price = { input = 0.40, cached_input = 0.10, output = 1.60 }
"""
FLOWER_PASSWORD = uuid.uuid4().hex


class Fleet:
    """The stack, and the host beside it that submits."""

    def __init__(self, project: Project, home: Path, ports: dict[str, int], secrets: dict[str, str]) -> None:
        self.project = project
        self.flower = f"http://127.0.0.1:{ports['MILL_FLOWER_PORT']}"
        database = f"postgresql+psycopg://batchmill:{secrets['POSTGRES_PASSWORD']}@127.0.0.1:{ports['MILL_POSTGRES_PORT']}/batchmill"
        self.mill = Mill(
            home,
            broker_url=f"redis://:{secrets['REDIS_PASSWORD']}@127.0.0.1:{ports['MILL_REDIS_PORT']}/0",
            database_url=database,
            base_url="http://simulator:8080/v1",
            sim=Provider(ports["SIMULATOR_PORT"]),  # type: ignore[arg-type]  # it asks for the bill alone
        )

    def batchmill(self, *arguments: str) -> str:
        """The command line, on the host."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        env = {**clean, "BATCHMILL_HOME": str(self.mill.home)}
        return run([str(Path(sys.executable).with_name("batchmill")), *arguments], env=env)

    def job(self, public_id: str) -> JobRecord:
        with self.mill.database.reading() as conn:
            return jobs.find(conn, public_id)

    def workers(self, job: JobRecord) -> set[str]:
        """Short ids of the containers that have asked the provider for this job."""
        with self.mill.database.reading() as conn:
            names = conn.execute(select(call.c.worker).where(call.c.job_id == job.id).distinct()).scalars()
            return {name.partition("@")[2] for name in names}

    def wait_workers(self, count: int) -> None:
        """Waits until that many have said within the last seconds that they take work; `watch` waits less long."""
        until(f"{count} workers live", lambda: len(self._live()) == count, timeout_s=90, every_s=0.5)

    def _live(self) -> list[WorkerRecord]:
        with self.mill.database.reading() as conn:
            return [w for w in telemetry.live_workers(conn, within_ms=5_000) if w.state == "ready"]

    def wait_worked(self, job: JobRecord, containers: list[str]) -> None:
        wanted = {c[:12] for c in containers}
        until(f"containers {wanted} have asked", lambda: wanted <= self.workers(job), timeout_s=60)


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    config = folder / "batchmill.toml"
    config.write_text(MODELS)
    secrets = {"POSTGRES_PASSWORD": uuid.uuid4().hex, "REDIS_PASSWORD": uuid.uuid4().hex}
    ours = {"BATCHMILL_LEASE_S": "10", "BATCHMILL_FLOWER_PASSWORD": FLOWER_PASSWORD}
    env_file = folder / "secrets.env"
    env_file.write_text("".join(f"{k}={v}\n" for k, v in {**secrets, **ours}.items()))
    names = ("MILL_REDIS_PORT", "MILL_POSTGRES_PORT", "MILL_FLOWER_PORT", "SIMULATOR_PORT")
    ports = {name: free_port() for name in names}
    variables = {"MILL_CONFIG": str(config), **{name: str(port) for name, port in ports.items()}}
    project = Project(f"batchmill-test-{uuid.uuid4().hex[:8]}", env_file, variables)
    try:
        project("up", "-d")
        home = folder / "host"
        home.mkdir()
        standing = Fleet(project, home, ports, secrets)
        failed = request.session.testsfailed
        yield standing
        standing.mill.close()
        if request.session.testsfailed > failed:
            sys.stderr.write(project.logs())
    except BaseException:
        sys.stderr.write(project.logs())
        raise
    finally:
        project.down()


def test_a_job_outlives_its_containers_and_costs_what_was_billed(fleet: Fleet, tmp_path: Path) -> None:
    data = tmp_path / "reviews.jsonl"
    data.write_text("".join(json.dumps({"n": n, "text": f"a great product, number {n}"}) + "\n" for n in range(ROWS)))
    options = ["--model", "sim-chat", "--prompt", PROMPT, "--param", "max_tokens=20", "--chunk-size", "20"]
    job = fleet.job(fleet.batchmill("submit", str(data), *options).strip())
    fleet.project("up", "-d", "--scale", "api=2")
    first, second = fleet.project.containers("api")
    fleet.wait_worked(job, [first, second])
    run(["docker", "kill", first])
    run(["docker", "stop", "-t", "60", second])
    drained = fleet.project.state(second)
    rows_before = len(fleet.mill.saved(job))
    fleet.project("up", "-d", "--scale", "api=2")
    fleet.wait_workers(2)
    fleet.batchmill("watch", job.public_id)
    fleet.batchmill("results", job.public_id, "-o", str(tmp_path / "labels.jsonl"))

    assert drained["ExitCode"] == 0
    assert 0 < rows_before < ROWS, "the job was over before anything happened to it"
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(ROWS))
    assert {line["status"] for line in lines} <= {"ok", "truncated"}
    fleet.mill.invariants(job)  # among them: every call that was billed is in the ledger, once, at its price
    fleet.batchmill("doctor", "--verify", job.public_id)
    shown = json.loads(fleet.batchmill("show", job.public_id, "--json"))
    billed = Decimal(str(fleet.mill.sim.bill()["cost_usd"]))  # type: ignore[union-attr]  # there is one
    assert Decimal(shown["cost_usd"]) <= billed <= Decimal(shown["cost_usd"]) + Decimal(shown["unknown_usd"] or 0)


def test_containers_are_healthy_by_what_they_do(fleet: Fleet) -> None:
    for service in ("api", "flower"):
        container = fleet.project.containers(service)[0]
        until(f"{service} is healthy", lambda c=container: _health(fleet, c) == "healthy", timeout_s=60, every_s=1.0)  # type: ignore[misc]

    frozen = fleet.project.containers("api")[0]
    run(["docker", "exec", frozen, "python", "-c", FREEZE])

    until("a frozen worker is unhealthy", lambda: _health(fleet, frozen) == "unhealthy", timeout_s=60, every_s=1.0)
    run(["docker", "kill", frozen])


# Stops every worker process of the container but not the supervisor, as a deadlock would.
FREEZE = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdigit() and int(folder.name) != os.getpid():
        try:
            if b"batchmill_workers.tasks" in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGSTOP)
        except FileNotFoundError:
            pass
"""


def _health(fleet: Fleet, container: str) -> str:
    health = fleet.project.state(container)["Health"]
    print(health["Status"], *(entry["Output"].strip() for entry in health["Log"][-1:]))  # shown when a test fails
    return str(health["Status"])


def test_a_worker_runs_as_nobody_special_and_the_broker_never_evicts(fleet: Fleet) -> None:
    worker = fleet.project.containers("flower")[0]
    broker, cache = (fleet.project.containers(name)[0] for name in ("redis", "cache"))

    user = run(["docker", "exec", worker, "id", "-u"])
    policies = [run(["docker", "exec", c, "redis-cli", "config", "get", "maxmemory-policy"]) for c in (broker, cache)]

    assert user.strip() == "10001"
    assert "noeviction" in policies[0]
    assert "allkeys-lru" in policies[1]


def test_flower_is_there_for_who_knows_the_password(fleet: Fleet) -> None:
    login = base64.b64encode(f"batchmill:{FLOWER_PASSWORD}".encode()).decode()
    asked = urllib.request.Request(f"{fleet.flower}/workers", headers={"Authorization": f"Basic {login}"})

    until("Flower shows the worker", lambda: "api0@" in _page(asked), timeout_s=60, every_s=0.5)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{fleet.flower}/workers", timeout=20)


def _page(asked: urllib.request.Request) -> str:
    """Nothing while it does not listen yet."""
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_a_stack_without_a_password_says_where_to_set_it(image: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty.env"
    empty.write_text("REDIS_PASSWORD=x\n")
    project = Project(
        "batchmill-test-none", empty, {"MILL_CONFIG": str(empty), "SIMULATOR_PORT": "1", "POSTGRES_PASSWORD": ""}
    )

    with pytest.raises(AssertionError, match=r"set it in \.env"):
        project("config")
