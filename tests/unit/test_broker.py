"""Celery's settings, each of which would lose or double work if it were wrong, and publishing through them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from celery.exceptions import QueueNotFound
from kombu.exceptions import OperationalError

from batchmill_core.broker import KEY_PREFIX, RUN_CHUNK, celery_settings, make_celery, publish, queue
from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings
from tests.mill import QUEUE, catalog_for
from tests.servers import free_port

# By name: the value, as argued in the hazards page.
WANTED = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_acks_on_failure": True,
    "task_acks_on_timeout": True,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    "task_create_missing_queues": False,
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "broker_connection_max_retries": None,
    "broker_connection_retry_on_startup": True,
    "worker_send_task_events": True,
    "task_send_sent_event": False,
}
TRANSPORT = {
    "visibility_timeout": 3600,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    "socket_timeout": 30,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
    "health_check_interval": 25,
    "global_keyprefix": KEY_PREFIX,
}


def settings(folder: Path, **options: Any) -> Settings:
    return Settings(home=folder, catalog=catalog_for(), **options)


@pytest.mark.parametrize("name", WANTED)
def test_the_setting_is_what_it_must_be(tmp_path: Path, name: str) -> None:
    app = make_celery(settings(tmp_path), broker_url="memory://")

    assert app.conf[name] == WANTED[name]


@pytest.mark.parametrize("name", TRANSPORT)
def test_the_transport_option_is_what_it_must_be(tmp_path: Path, name: str) -> None:
    app = make_celery(settings(tmp_path), broker_url="memory://")

    assert app.conf.broker_transport_options[name] == TRANSPORT[name]


def test_celery_knows_every_setting_by_that_name(tmp_path: Path) -> None:
    from celery.app.defaults import NAMESPACES, flatten

    known = {name for name, _ in flatten(NAMESPACES)}

    assert set(celery_settings(settings(tmp_path))) - known == set()


def test_there_is_no_result_backend_and_no_default_app(tmp_path: Path) -> None:
    import celery

    app = make_celery(settings(tmp_path), broker_url="memory://")

    assert app.conf.result_backend is None
    assert celery.current_app is not app


def test_there_is_a_queue_for_each_account_and_each_local_model(tmp_path: Path) -> None:
    catalog = catalog_for()
    local = ModelEntry(name="small", engine="openvino", source="x")
    both = type(catalog)(accounts=catalog.accounts, models={**catalog.models, "small": local})

    app = make_celery(Settings(home=tmp_path, catalog=both), broker_url="memory://")

    assert {q.name for q in app.conf.task_queues} == {QUEUE, "gpu.small", "batchmill.none"}


def test_without_a_broker_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="BATCHMILL_BROKER_URL"):
        make_celery(settings(tmp_path))


def test_a_message_is_a_number_and_lands_in_its_queue_under_our_prefix(tmp_path: Path, valkey_url: str) -> None:
    app = make_celery(settings(tmp_path, broker_url=valkey_url))

    publish(app, 4711, QUEUE, "reviews · rows 0-9 · m-1")

    with redis.Redis.from_url(valkey_url) as client:
        (message,) = client.lrange(f"{KEY_PREFIX}{QUEUE}", 0, -1)
        keys = client.keys("*")
    body = json.loads(message)
    assert body["headers"]["task"] == RUN_CHUNK
    assert body["headers"]["argsrepr"] == "reviews · rows 0-9 · m-1"
    assert json.loads(__import__("base64").b64decode(body["body"]))[0] == [4711]
    assert len(message) < 1200
    assert all(k.startswith(KEY_PREFIX.encode()) for k in keys)
    app.close()


def test_a_queue_that_is_not_configured_here_can_be_published_to(tmp_path: Path, valkey_url: str) -> None:
    app = make_celery(settings(tmp_path, broker_url=valkey_url))

    publish(app, 1, "gpu.elsewhere", "x")

    with redis.Redis.from_url(valkey_url) as client:
        assert client.llen(f"{KEY_PREFIX}gpu.elsewhere") == 1
    app.close()


def test_a_misspelt_queue_name_fails_loudly(tmp_path: Path) -> None:
    app = make_celery(settings(tmp_path), broker_url="memory://")

    with pytest.raises(QueueNotFound, match=r"api\.acmee"):
        app.send_task(RUN_CHUNK, args=(1,), queue="api.acmee")


def test_a_worker_told_of_a_misspelt_queue_does_not_start(tmp_path: Path) -> None:
    app = make_celery(settings(tmp_path), broker_url="memory://")

    with pytest.raises(KeyError, match=r"api\.acmee"):
        app.amqp.queues.select(["api.acmee"])


def test_a_broker_that_refuses_is_told_within_seconds(tmp_path: Path) -> None:
    app = make_celery(settings(tmp_path, broker_url=f"redis://127.0.0.1:{free_port()}/0"))

    with pytest.raises(OperationalError):
        publish(app, 1, QUEUE, "x")


def test_a_queue_carries_its_own_routing_key() -> None:
    made = queue("api.x")

    assert isinstance(made, kombu.Queue)
    assert (made.name, made.routing_key) == ("api.x", "api.x")
