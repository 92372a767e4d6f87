"""Our task in a real Celery worker (in this process): what its events carry is what Flower shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchmill_core.broker import RUN_CHUNK, celery_settings, publish
from batchmill_core.catalog import Account, Catalog
from batchmill_core.settings import Settings

# Not from the conftest: pytest-celery's own plugin is switched off for the whole run (`-p no:celery`), because its
# `celery_worker` needs Docker and takes the name of the one that is meant here (pytest-celery#442).
pytest_plugins = ("celery.contrib.pytest",)

QUEUE = "api.bell"  # of this test alone: the in-memory broker is one for the whole process
LABEL = "reviews · rows 400-499 · smollm2"
WORDS = "97 ok, 3 truncated · 5,412 tok · $0.0041 · 41 rows/s"
TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def celery_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    catalog = Catalog(accounts={"bell": Account(name="bell", base_url="http://127.0.0.1:9/v1")})
    settings = Settings(home=Path(tmp_path_factory.getbasetemp()), catalog=catalog)
    return {
        **celery_settings(settings),
        "broker_url": "memory://",
        "broker_transport_options": {"polling_interval": 0.02},
    }


@pytest.fixture
def celery_worker_parameters() -> dict[str, Any]:
    return {"perform_ping_check": False}


@pytest.fixture
def celery_worker_pool() -> str:
    return "threads"


@pytest.fixture
def chunks_run(celery_app: Celery) -> list[int]:
    """The chunks that our task was given; it answers as a chunk's run does."""
    given: list[int] = []

    @celery_app.task(name=RUN_CHUNK)
    def run_chunk(chunk_id: int) -> str:
        given.append(chunk_id)
        return WORDS

    return given


class Events:
    """The task events that reach a listener, as Flower is one."""

    def __init__(self) -> None:
        self.by_type: dict[str, dict[str, Any]] = {}
        self.changed = threading.Condition()
        self.ready = threading.Event()
        self.stop = threading.Event()

    def note(self, event: dict[str, Any]) -> None:
        with self.changed:
            self.by_type[event["type"]] = event
            self.changed.notify_all()

    def listen(self, app: Celery) -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": self.note})
            with receiver.consumer_context() as (own_connection, _, _):
                self.ready.set()
                while not self.stop.is_set():
                    try:
                        own_connection.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    def wait_for(self, kind: str) -> dict[str, Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: kind in self.by_type, TIMEOUT_S), (
                f"{kind} did not come, but {list(self.by_type)}"
            )
            return self.by_type[kind]


@pytest.fixture
def events(celery_app: Celery) -> Iterator[Events]:
    heard = Events()
    thread = threading.Thread(target=heard.listen, args=(celery_app,), daemon=True)
    thread.start()
    assert heard.ready.wait(TIMEOUT_S)
    yield heard
    heard.stop.set()
    thread.join(TIMEOUT_S)


def test_flower_is_told_what_a_chunk_is_and_what_came_of_it(
    celery_app: Celery, chunks_run: list[int], events: Events, celery_worker: Any
) -> None:
    publish(celery_app, 4711, QUEUE, LABEL)

    succeeded, received = events.wait_for("task-succeeded"), events.wait_for("task-received")
    assert chunks_run == [4711]
    assert (received["name"], received["args"]) == (RUN_CHUNK, LABEL)
    assert succeeded["result"] == repr(WORDS)
    assert received["uuid"] == succeeded["uuid"]
