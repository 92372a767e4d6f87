"""The one place where Celery is configured, and the names of tasks and queues.

Celery is a doorbell here: a message carries a chunk's id, SQL decides who works on it. The settings follow from that and
from how kombu's Redis transport behaves; each has its reason beside it.
"""

from __future__ import annotations

import socket
from typing import Any

from celery import Celery
from kombu import Queue

from .errors import ConfigurationError
from .settings import Settings

RUN_CHUNK = "batchmill.run_chunk"
KEY_PREFIX = "batchmill:"


def make_celery(settings: Settings, *, broker_url: str | None = None) -> Celery:
    """The Celery application of these settings; ``broker_url`` is the embedded stack's, when none is configured.

    Raises ConfigurationError when there is no broker at all.
    """
    url = broker_url or settings.broker_url
    if url is None:
        raise ConfigurationError(
            "no broker is configured and no embedded stack runs here; set BATCHMILL_BROKER_URL (redis://HOST:6379/0) "
            "or use `batchmill run`, which starts what it needs"
        )
    app = Celery("batchmill", broker=url, set_as_current=False)
    app.conf.update(celery_settings(settings))
    return app


def make_bell(settings: Settings, *, broker_url: str | None = None) -> Celery:
    """An application that only publishes, and gives up within seconds: a broker that hangs must not hang who rings.

    Workers wait for messages on connections of their own, which have more patience (see `celery_settings`).
    """
    app = make_celery(settings, broker_url=broker_url)
    patience = {"socket_timeout": 3, "socket_connect_timeout": 2}
    app.conf.broker_transport_options = {**app.conf.broker_transport_options, **patience}
    app.conf.task_publish_retry = False
    return app


def celery_settings(settings: Settings) -> dict[str, Any]:
    """Celery's settings by name. Asserted by a test, because a wrong one loses or doubles work silently."""
    return {
        "task_acks_late": True,  # an unfinished chunk's message comes back
        "task_reject_on_worker_lost": True,
        "task_acks_on_failure": True,  # SQL, not the queue, repeats what failed
        "task_acks_on_timeout": True,
        "task_ignore_result": True,  # results are in SQL; what a task returns is for Flower's events only
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_create_missing_queues": False,  # a misspelt queue fails loudly
        "task_queues": queues(settings),
        "task_default_queue": "batchmill.none",
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,  # a chunk waits where every worker sees it
        "worker_cancel_long_running_tasks_on_connection_loss": False,  # paid work outlives a lost connection
        "broker_connection_max_retries": None,
        "broker_connection_retry_on_startup": True,
        "worker_send_task_events": True,
        "task_send_sent_event": False,
        "task_track_started": False,
        "worker_hijack_root_logger": False,
        "enable_utc": True,
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "socket_timeout": 30,  # kombu's own default waits for ever
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
            "global_keyprefix": KEY_PREFIX,
            "client_name": f"batchmill@{socket.gethostname()}",
        },
        "task_publish_retry_policy": {
            "max_retries": 2,
            "interval_start": 0.1,
            "interval_step": 0.2,
            "interval_max": 0.5,
        },
    }


def queues(settings: Settings) -> list[Queue]:
    """One queue per account and one per model of the GPU wing."""
    catalog = settings.catalog
    names = [a.queue for a in catalog.accounts.values()]
    names += [m.queue for m in catalog.models.values() if m.account is None]
    return [queue(name) for name in dict.fromkeys([*names, "batchmill.none"])]


def queue(name: str) -> Queue:
    """A queue by name, good for publishing to queues that this process has no configuration for."""
    return Queue(name, routing_key=name)


def publish(app: Celery, chunk_id: int, queue_name: str, label: str) -> None:
    """Rings for one chunk. Raises kombu.exceptions.OperationalError when the broker does not answer within seconds."""
    to: Any = queue(queue_name)  # celery-types knows names only; Celery takes Queue objects too
    app.send_task(RUN_CHUNK, args=(chunk_id,), queue=to, argsrepr=label, ignore_result=True)
