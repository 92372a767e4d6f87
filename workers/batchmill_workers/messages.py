"""Acknowledging or giving back a message whose connection is gone must not end the worker.

A chunk may end in the moment in which Celery notices that the broker is lost. Its acknowledgement then waits in the hub,
which runs it while it closes; kombu 5.6 to 5.7 raises AttributeError for a channel without a connection, that takes the
place of the connection's error, and Celery gives up instead of connecting again, with calls in flight that are paid for.
The same becomes of messages that it took and did not begin: closing the channel gives them back over the lost connection.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu.transport import redis as redis_transport

log = logging.getLogger(__name__)
_Message: Any = redis_transport.Channel.Message
_QoS: Any = redis_transport.Channel.QoS


class Doorbell(_Message):  # type: ignore[misc]  # kombu has no types
    """A message of the Redis transport. One that cannot be acknowledged comes again, and SQL says that it is done."""

    def ack_log_error(self, logger: Any, errors: Any, multiple: bool = False) -> None:
        try:
            super().ack_log_error(logger, errors, multiple=multiple)
        except errors:
            raise  # Celery connects again
        except Exception as fault:  # noqa: BLE001  # whatever it was, the message comes again
            log.warning("message_not_acknowledged error=%r", fault)

    def reject_log_error(self, logger: Any, errors: Any, requeue: bool = False) -> None:
        try:
            super().reject_log_error(logger, errors, requeue=requeue)
        except Exception as fault:  # noqa: BLE001  # as above
            log.warning("message_not_rejected error=%r", fault)


class Unacknowledged(_QoS):  # type: ignore[misc]  # as above
    """The messages that a channel has taken. Those that cannot be given back come again by themselves."""

    def restore_unacked_once(self, stderr: Any = None) -> None:
        try:
            super().restore_unacked_once(stderr)
        except Exception as fault:  # noqa: BLE001  # as above: the broker is away, or the channel has lost its connection
            log.warning("messages_not_given_back error=%r", fault)


def install() -> None:
    """Makes every Redis channel of this process hand out such messages, and let them go. Idempotent."""
    redis_transport.Channel.Message = Doorbell
    redis_transport.Channel.QoS = Unacknowledged
