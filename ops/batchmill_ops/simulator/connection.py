"""One HTTP/1.1 connection of a local test server: reads requests, plays the replies that a function decides.

Requests of one connection are answered one after the other, as HTTP asks, also when they were pipelined.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools

MAX_REQUEST_BYTES = 64 << 20
_MAX_BACKLOG = 64
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {529: "Site is overloaded"}


class Ending(StrEnum):
    """What happens after a reply: the connection stays, is closed, or falls silent for good."""

    KEEP = "keep"
    CLOSE = "close"
    HANG = "hang"


# Values that are made once per call are named tuples here: a frozen dataclass takes four times as long to make.


class HttpRequest(NamedTuple):
    """One request as it came. Headers are decoded only when asked for: most requests are answered without."""

    method: str
    target: str
    raw_headers: Mapping[bytes, bytes]
    body: bytes
    keep_alive: bool = True

    def header(self, name: bytes) -> str | None:
        """The value of the header with this lower-case name."""
        return _header(self.raw_headers, name)

    @property
    def headers(self) -> dict[str, str]:
        """All headers, their names in lower case."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.raw_headers.items()}


class Reply(NamedTuple):
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
        self._backlog: deque[HttpRequest] = deque()
        self._busy = False
        self._reading = self._writable = True
        self._timer: asyncio.TimerHandle | None = None
        self._received_bytes = 0
        # Built-in methods as callbacks: a Python function per header would cost a tenth of the whole request.
        self._target: list[bytes] = []
        self.on_url = self._target.append
        self._headers: dict[bytes, bytes] = {}
        self.on_header = self._headers.__setitem__
        self._body: list[bytes] = []
        self.on_body = self._body.append
        self._parser = httptools.HttpRequestParser(self)

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
        self._received_bytes += len(data)
        if self._received_bytes > MAX_REQUEST_BYTES:
            return self._refuse(413)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return self._refuse(400)
        if self._headers:
            self._continue()
        return self._advance()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._advance()

    def on_message_complete(self) -> None:
        parser = self._parser
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        target, method = b"".join(self._target).decode("latin-1"), parser.get_method().decode("ascii")
        self._backlog.append(HttpRequest(method, target, self._headers.copy(), body, parser.should_keep_alive()))
        self._received_bytes = 0
        self._target.clear()
        self._headers.clear()
        self._body.clear()

    def _continue(self) -> None:
        """Tells a client that sent headers and waits to be asked for the body to send it."""
        if self._busy or self._backlog or (_header(self._headers, b"expect") or "").lower() != "100-continue":
            return
        for name in [name for name in self._headers if name.lower() == b"expect"]:
            del self._headers[name]
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _advance(self) -> None:
        while self._backlog and self._writable and not self._busy:
            request = self._backlog.popleft()
            reply = self._respond(request)
            if not request.keep_alive and reply.ending is Ending.KEEP:
                reply = reply._replace(ending=Ending.CLOSE)
            self._play(reply)
        if self._backlog or not self._reading:
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


def _header(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    for given in headers:
        if given.lower() == name:
            return headers[given].decode("latin-1")
    return None


def head(status: int, content_type: str, *, length: int | None, extra: str = "") -> bytes:
    """Status line and headers; without a ``length`` the body is sent in chunks. ``extra`` holds whole header lines."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    reason = _REASONS.get(status, "")
    return f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\n{extra}{framing}\r\n\r\n".encode("latin-1")
