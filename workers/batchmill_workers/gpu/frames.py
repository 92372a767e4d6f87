"""JSON messages between a worker and its engine's process: four bytes of length, then the JSON."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import orjson

HEADER = struct.Struct("<I")
Frame = dict[str, Any]
_READ_BYTES = 1 << 16


def encode(frame: Mapping[str, Any]) -> bytes:
    """One message as bytes. Raises TypeError for what JSON cannot hold."""
    body = orjson.dumps(frame)
    return HEADER.pack(len(body)) + body


class Channel:
    """The engine process's end: blocking sends, and receives that wait only when asked to."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, frame: Mapping[str, Any]) -> None:
        self._connection.sendall(encode(frame))

    def receive(self, *, wait: bool) -> list[Frame]:
        """All messages that have come; with ``wait`` at least one. Raises EOFError when the worker is gone."""
        frames = self._take()
        while self._readable(wait=wait and not frames):
            data = self._connection.recv(_READ_BYTES)
            if not data:
                raise EOFError("the worker closed the channel")
            self._buffer += data
            frames += self._take()
        return frames

    def _readable(self, *, wait: bool) -> bool:
        return bool(select.select([self._connection], [], [], None if wait else 0)[0])

    def _take(self) -> list[Frame]:
        frames = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(orjson.loads(self._buffer[HEADER.size : end]))
            del self._buffer[:end]
        return frames


async def deliver_frames(channel: Channel, take: Callable[[Frame], None]) -> None:
    """Hands every message to ``take`` as it comes, on the running event loop.

    Ends only with an error: of ``take``, or EOFError or an OSError when the worker is gone.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        try:
            for frame in channel.receive(wait=False):
                take(frame)
        except Exception as error:  # noqa: BLE001  # handed to the one who awaits
            if not ended.done():
                ended.set_exception(error)

    loop.add_reader(channel.fileno(), read)
    try:
        await ended
    finally:
        loop.remove_reader(channel.fileno())
