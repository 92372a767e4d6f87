"""The worker image under pytest-celery's own fixtures: a Redis broker, a worker and a broker that are restarted.

pytest-celery's plugin is switched off for all other tests (`-p no:celery` in pyproject.toml), because its `celery_worker`,
which needs Docker, takes the name of Celery's own, which runs in the test's process (pytest-celery#442). It is loaded here
under its module's name, and this module is collected by `make test-compose` alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
from pytest_celery import (
    CeleryTestSetup,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBroker,
)
from pytest_docker_tools import container, fxtr
from pytest_docker_tools.wrappers import Container

from batchmill_db.session import Database
from tests.compose.engine import IMAGE, Provider
from tests.integration.harness import QUEUE, Mill, until

pytest_plugins = ("pytest_celery.plugin",)

ROWS = 300
HOME = "/var/lib/batchmill"
PASSWORD = uuid.uuid4().hex
LOOPBACK = ("127.0.0.1", None)  # a free port of this host alone


class Broker(RedisContainer):
    @classmethod
    def image(cls) -> str:
        return "redis:7"

    @classmethod
    def ports(cls) -> dict[str, Any]:
        return {"6379/tcp": LOOPBACK}


class ApiWorker(CeleryWorkerContainer):
    """What our image runs: `batchmill worker api`, whose child is the Celery worker."""

    @classmethod
    def command(cls, *_: str, **__: Any) -> list[str]:
        return ["worker", "api"]

    @classmethod
    def version(cls) -> str:
        return celery.__version__

    @classmethod
    def worker_name(cls) -> str:
        return "api0"

    @classmethod
    def worker_queue(cls) -> str:
        return QUEUE


postgres = container(
    image="postgres:15",
    environment={
        "POSTGRES_USER": "batchmill",
        "POSTGRES_PASSWORD": PASSWORD,
        "POSTGRES_DB": "batchmill",
        "LANG": "C.UTF-8",
    },
    network="{default_pytest_celery_network.name}",
    ports={"5432/tcp": LOOPBACK},
    timeout=60,
)
simulator = container(
    image=IMAGE,
    command=["simulate", "--host", "0.0.0.0", "--port", "8080", "--latency", "300ms", "--fail", "429:0.03"],
    network="{default_pytest_celery_network.name}",
    ports={"8080/tcp": LOOPBACK},
    timeout=60,
)
default_worker_container = container(
    image=IMAGE,
    environment=fxtr("default_worker_env"),
    network="{default_pytest_celery_network.name}",
    volumes={"{default_worker_volume.name}": {"bind": HOME, "mode": "ro"}},
    wrapper_class=ApiWorker,
    timeout=60,
    command=fxtr("default_worker_command"),
)


@pytest.fixture
def default_redis_broker_cls() -> type[RedisContainer]:
    return Broker


@pytest.fixture
def default_worker_container_cls(image: str) -> type[CeleryWorkerContainer]:
    return ApiWorker


@pytest.fixture
def celery_broker(celery_redis_broker: RedisTestBroker) -> RedisTestBroker:
    """Redis alone of all brokers that pytest-celery knows."""
    return celery_redis_broker


@pytest.fixture
def celery_backend_cluster() -> None:
    """None: results are in SQL."""


@pytest.fixture
def mill(
    image: str, tmp_path: Path, postgres: Container, simulator: Container, celery_redis_broker: RedisTestBroker
) -> Iterator[Mill]:
    """The host's side: it submits, and asks SQL and the provider how it went."""
    database_url = f"postgresql+psycopg://batchmill:{PASSWORD}@127.0.0.1:{_port(postgres, '5432/tcp')}/batchmill"
    until("PostgreSQL answers", lambda: _answers(database_url), timeout_s=60, every_s=0.5)
    made = Mill(
        tmp_path,
        broker_url=f"redis://127.0.0.1:{_port(celery_redis_broker.container, '6379/tcp')}/0",
        database_url=database_url,
        base_url=f"http://{simulator.attrs['Config']['Hostname']}:8080/v1",
        sim=Provider(_port(simulator, "8080/tcp")),  # type: ignore[arg-type]  # it asks for the bill alone
        account={"max_in_flight": 8},
    )
    yield made
    made.close()


@pytest.fixture
def default_worker_initial_content(mill: Mill) -> dict[str, bytes]:
    """The worker's batchmill.toml: the host's; the addresses in it count for less than the environment's."""
    return {"batchmill.toml": (mill.home / "batchmill.toml").read_bytes()}


@pytest.fixture
def default_worker_env(mill: Mill, postgres: Container, celery_worker_cluster_config: dict[str, Any]) -> dict[str, str]:
    address = f"{postgres.attrs['Config']['Hostname']}:5432"
    return {
        "BATCHMILL_BROKER_URL": celery_worker_cluster_config["celery_broker_cluster_config"]["urls"][0],
        "BATCHMILL_DATABASE_URL": f"postgresql+psycopg://batchmill:{PASSWORD}@{address}/batchmill",
        "BATCHMILL_LEASE_S": "10",
    }


def _port(of: Container, name: str) -> int:
    """The port of this host; `get_addr` tells the container's own where the tests themselves run in a container."""
    return int(of.ports[name][0])


def _answers(database_url: str) -> bool:
    database = Database(database_url)
    try:
        database.run(lambda _: None, patience_s=0.1)
    except Exception:  # noqa: BLE001  # whatever it is: asked again until the time is over
        return False
    finally:
        database.close()
    return True


def _assert_all_there_at_the_right_price(mill: Mill, job: Any) -> None:
    mill.invariants(job)
    done = mill.wait_done(job, timeout_s=5)
    assert done.unknown_calls == 0
    assert done.cost_nanousd == sum(line.cost_nanousd or 0 for line in mill.bill())


def test_a_restarted_worker_hands_back_what_it_has_and_goes_on(celery_setup: CeleryTestSetup, mill: Mill) -> None:
    job = mill.submit(ROWS)
    mill.wait_rows(job, 30)
    celery_setup.worker.restart()  # TERM, and a minute for the drain
    at_restart = len(mill.saved(job))
    mill.wait_done(job, timeout_s=90)

    assert 30 <= at_restart < ROWS
    _assert_all_there_at_the_right_price(mill, job)


def test_a_restarted_broker_that_forgot_everything_costs_nothing(celery_setup: CeleryTestSetup, mill: Mill) -> None:
    job = mill.submit(ROWS)
    mill.wait_rows(job, 30)
    celery_setup.broker.restart()  # it keeps nothing on disk
    at_restart = len(mill.saved(job))
    mill.wait_done(job, timeout_s=90)

    assert 30 <= at_restart < ROWS
    _assert_all_there_at_the_right_price(mill, job)
