"""The inside of an engine's own process: what every kind of engine does before and after its model runs."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol

from batchmill_workers.gpu.frames import Channel, Frame


class Runner(Protocol):
    """A loaded model."""

    def run(self) -> None:
        """Answers what comes over the channel; returns, or raises EOFError or an OSError, when the worker is gone."""


def serve(load: Callable[[Frame, Channel], tuple[Runner, Frame]], reason: Callable[[BaseException], str] = str) -> None:
    """Loads by the first message, says that it is ready with the facts of the loading, and runs to the worker's end.

    An error of either is told to the worker as ``reason`` has it, which tells the user.
    """
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # a whole group is signalled: the worker drains, then closes the channel
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    (configuration,) = channel.receive(wait=True)
    try:
        runner, facts = load(configuration, channel)
    except Exception as error:  # noqa: BLE001  # edge of the process: whatever it was, the worker says it to the user
        channel.send({"failed": reason(error) or type(error).__name__})
        return
    channel.send({"ready": facts})
    try:
        runner.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        channel.send({"failed": reason(error) or type(error).__name__})
        raise


def failure(number: int, kind: str, message: str) -> Frame:
    """The last message of a call without an answer; ``kind`` is too_long, invalid_request, engine_failed or engine_down.

    The last of them says that the device is lost: the worker ends and another starts, the row keeps its turn.
    """
    return {"id": number, "done": True, "error": {"kind": kind, "message": message}}
