"""Messages whose connection is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.transport import redis as redis_transport

from batchmill_core.broker import make_celery
from batchmill_core.settings import load_settings
from batchmill_workers import messages

CATALOG = '[accounts.sim]\nbase_url = "http://127.0.0.1:9/v1"\n'


@pytest.fixture
def message(tmp_path: Path, valkey_url: str) -> Iterator[Any]:
    """A message that was taken over a connection that is closed since."""
    before = redis_transport.Channel.Message, redis_transport.Channel.QoS
    messages.install()
    (tmp_path / "batchmill.toml").write_text(CATALOG)
    app = make_celery(load_settings(tmp_path, {}), broker_url=valkey_url)
    connection = app.connection_for_read()
    with connection.SimpleQueue("closed-meanwhile") as queue:
        queue.put({"chunk": 1})
        taken = queue.get(timeout=10)
    connection.collect()  # as Celery does with a connection that it has lost
    taken.channel._disconnect_pools()
    yield taken
    redis_transport.Channel.Message, redis_transport.Channel.QoS = before


@pytest.mark.parametrize("settle", ["ack_log_error", "reject_log_error"])
def test_a_message_whose_connection_is_gone_is_left_to_come_again(
    message: Any, settle: str, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(message, settle)(logging.getLogger("kombu"), (ConnectionError,))

    assert [r.getMessage().split(" ")[0] for r in caplog.records if r.name == messages.__name__] == [
        "message_not_acknowledged" if settle == "ack_log_error" else "message_not_rejected"
    ]
    assert not message.acknowledged


def test_messages_that_cannot_be_given_back_do_not_end_the_close(
    message: Any, caplog: pytest.LogCaptureFixture
) -> None:
    qos = message.channel.qos
    qos._delivered[message.delivery_tag] = message  # taken and not begun when the connection was lost
    qos._delivered.restored = False

    qos.restore_unacked_once()

    told = [r.getMessage().split(" ")[0] for r in caplog.records if r.name == messages.__name__]
    assert told == ["messages_not_given_back"]
