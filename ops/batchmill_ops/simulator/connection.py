"""One HTTP/1.1 connection of a local test server: reads requests, plays the replies that a function decides.

Requests of one connection are answered one after the other, as HTTP asks, also when they were pipelined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import cast

import httptools

MAX_BODY_BYTES = 64 << 20
_MAX_BACKLOG = 64
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {529: "Site is overloaded"}


class Ending(StrEnum):
    """What happens after a reply: the connection stays, is closed, or falls silent for good."""

    KEEP = "keep"
    CLOSE = "close"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request as it came; header names are lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    keep_alive: bool = True


@dataclass(frozen=True, slots=True)
class Reply:
    """Bytes to send: the first part after ``delay_s`` seconds, each next one ``gap_s`` seconds later."""

    parts: tuple[bytes, ...] = ()
    delay_s: float = 0.0
    gap_s: float = 0.0
    ending: Ending = Ending.KEEP


class HttpConnection(asyncio.Protocol):
    """Give ``respond`` a pure-as-possible function; it runs on the loop once per request, in order of arrival."""

    def __init__(self, respond: Callable[[HttpRequest], Reply], open_connections: set[HttpConnection]) -> None:
        self._respond = respond
        self._open_connections = open_connections
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._backlog: deque[HttpRequest] = deque()
        self._busy = False
        self._reading = self._writable = True
        self._timer: asyncio.TimerHandle | None = None
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.discard(self)
        self._busy = True
        self._backlog.clear()
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400)
        except httptools.HttpParserError:
            self._refuse(413 if self._body_bytes > MAX_BODY_BYTES else 400)
        else:
            self._advance()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._advance()

    # What httptools calls while it parses.

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue" and not self._busy and not self._backlog:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY_BYTES:
            raise ValueError("body too large")

    def on_message_complete(self) -> None:
        parser = self._parser
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._backlog.append(
            HttpRequest(
                parser.get_method().decode("ascii"),
                self._target.decode("latin-1"),
                self._headers,
                body,
                parser.should_keep_alive(),
            )
        )
        self._target, self._headers, self._body, self._body_bytes = b"", {}, [], 0

    # From a request to its reply on the wire.

    def _advance(self) -> None:
        while self._backlog and self._writable and not self._busy:
            request = self._backlog.popleft()
            reply = self._respond(request)
            if reply.ending is Ending.KEEP and not request.keep_alive:
                reply = Reply(reply.parts, reply.delay_s, reply.gap_s, Ending.CLOSE)
            self._play(reply)
        self._bound_backlog()

    def _play(self, reply: Reply) -> None:
        if reply.ending is Ending.HANG:
            self._busy = True
        elif reply.delay_s > 0:
            self._busy = True
            self._timer = self._loop.call_later(reply.delay_s, self._send, reply, 0)
        else:
            self._send(reply, 0)

    def _send(self, reply: Reply, position: int) -> None:
        was_waiting, self._busy, self._timer = self._busy, False, None
        if reply.gap_s > 0 and position + 1 < len(reply.parts):
            self._transport.write(reply.parts[position])
            self._busy = True
            self._timer = self._loop.call_later(reply.gap_s, self._send, reply, position + 1)
            return
        rest = reply.parts[position:]
        self._transport.write(rest[0] if len(rest) == 1 else b"".join(rest))
        if reply.ending is Ending.CLOSE:
            self._close()
        elif was_waiting:
            self._advance()

    def _bound_backlog(self) -> None:
        crowded = len(self._backlog) >= _MAX_BACKLOG
        if crowded == self._reading and not self._transport.is_closing():
            self._reading = not crowded
            if crowded:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _refuse(self, status: int) -> None:
        self._transport.write(head(status, "text/plain", length=0, extra="connection: close\r\n"))
        self._close()

    def _close(self) -> None:
        self._busy = True
        self._backlog.clear()
        self._transport.close()


def head(status: int, content_type: str, *, length: int | None, extra: str = "") -> bytes:
    """Status line and headers; without a ``length`` the body is sent in chunks. ``extra`` holds whole header lines."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    reason = _REASONS.get(status, "")
    return f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\n{extra}{framing}\r\n\r\n".encode("latin-1")
