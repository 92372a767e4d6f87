"""A local HTTP server that answers by script, for tests of what a client makes of real bytes.

The n-th request gets the n-th response; the last one repeats. Or a function answers each request. A response is a mapping as in ``shared/cases/responses``:

- ``status`` (200), ``headers`` ({}), and the body as ``json``, ``text`` or ``bytes``;
- ``cut_after``: send only that many bytes of the body under its full content-length, then close the connection;
- ``close``: close the connection after the whole body; with ``chunked`` and ``cut_after`` the last chunk is missing;
- ``chunked``: send the body in chunks, ``chunk_bytes`` (16) bytes each, ``chunk_gap_s`` (0) seconds apart;
- ``delay_s``: wait before answering; ``hang``: never answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from batchmill_ops.simulator.connection import Ending, HttpConnection, HttpRequest, Reply, head

_KEYS = frozenset(
    "status headers json text bytes cut_after close chunked chunk_bytes chunk_gap_s delay_s hang".split()  # noqa: SIM905
)
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it arrived; header names are lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


Answer = Callable[[RecordedRequest], Mapping[str, Any]]


class ScriptedServer:
    """``base_url`` ends in ``/v1``; ``requests`` grows as they arrive."""

    def __init__(self, responses: Sequence[Mapping[str, Any]] | Answer) -> None:
        self._answer = responses if callable(responses) else None
        self._replies = [] if callable(responses) else [_reply(response) for response in responses]
        self._connections: set[HttpConnection] = set()
        self.requests: list[RecordedRequest] = []
        self.base_url = ""

    def respond(self, request: HttpRequest) -> Reply:
        arrived = RecordedRequest(request.method, request.target, request.headers, request.body)
        number = len(self.requests)
        self.requests.append(arrived)
        if self._answer is not None:
            return _reply(self._answer(arrived))
        return self._replies[min(number, len(self._replies) - 1)]

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: HttpConnection(self.respond, self._connections), "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        ready.set()
        await stop.wait()
        server.close()
        for connection in list(self._connections):
            connection.abort()
        await server.wait_closed()
        await asyncio.sleep(0)  # lets the aborted transports close their sockets


@contextmanager
def scripted(responses: Sequence[Mapping[str, Any]] | Mapping[str, Any] | Answer) -> Iterator[ScriptedServer]:
    """Serves the script from a thread for the length of a ``with`` block."""
    server = ScriptedServer([responses] if isinstance(responses, Mapping) else responses)
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(server.serve(ready, stop))
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="scripted-server", daemon=True)
    thread.start()
    assert ready.wait(_TIMEOUT_S), "the scripted server did not start"
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_TIMEOUT_S)
        assert not thread.is_alive(), "the scripted server did not stop"


def _reply(response: Mapping[str, Any]) -> Reply:
    unknown = set(response) - _KEYS
    assert not unknown, f"a scripted response has no key {sorted(unknown)}"
    if response.get("hang"):
        return Reply(ending=Ending.HANG)
    body, content_type = _body(response)
    headers = {"content-type": content_type} | {k.lower(): str(v) for k, v in response.get("headers", {}).items()}
    content_type = headers.pop("content-type")
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    cut = response.get("cut_after")
    sent = body if cut is None else body[:cut]
    chunked = bool(response.get("chunked"))
    start = head(response.get("status", 200), content_type, length=None if chunked else len(body), extra=extra)
    size = response.get("chunk_bytes", 16)
    parts = [start, *(_chunks(sent, size, whole=cut is None) if chunked else [sent])]
    ending = Ending.CLOSE if cut is not None or response.get("close") else Ending.KEEP
    return Reply(tuple(parts), response.get("delay_s", 0.0), response.get("chunk_gap_s", 0.0), ending)


def _body(response: Mapping[str, Any]) -> tuple[bytes, str]:
    if "json" in response:
        return orjson.dumps(response["json"]), "application/json"
    if "bytes" in response:
        return response["bytes"], "application/octet-stream"
    return response.get("text", "").encode(), "text/plain; charset=utf-8"


def _chunks(body: bytes, size: int, *, whole: bool) -> list[bytes]:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    return [*framed, b"0\r\n\r\n"] if whole else framed
