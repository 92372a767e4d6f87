"""The connection to one account's server: bytes out, bytes in, and what breaks on the way translated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import get_env_proxy_for_url
from aiohttp.payload import Payload
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from batchmill_core.errors import (
    CallError,
    CallTimeout,
    ConfigurationError,
    ConnectionLost,
    MalformedResponse,
    Unreachable,
)

CONNECT_TIMEOUT_S = 10.0
MAX_BODY_BYTES = 64 * 1024 * 1024
# Below the five seconds after which uvicorn (vLLM and many others) hangs up an idle connection: a request that meets
# the hang-up may have run, so its cost would stay unknown.
_KEEP_IDLE_S = 4.0
_LAST_PIECE_S = 0.25
_THIS_HOST = frozenset({"localhost", "127.0.0.1", "::1"})
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S)

Headers = CIMultiDictProxy[str]
Feed = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer. ``body`` is empty when it was fed to a listener piece by piece. Latency counts from sending."""

    status: int
    headers: Headers
    body: bytes
    latency_s: float


class _SentBody(Payload):
    """A request body that knows when it was sent, and starts the deadline of its call at that moment.

    Not aiohttp's BytesPayload, which warns of every body above 1 MB: ours are one row's, and in memory already.
    """

    _value: bytes
    _autoclose = True

    def __init__(self, body: bytes, deadline: asyncio.Timeout, timeout_s: float) -> None:
        super().__init__(body, content_type="application/json")
        self._size = len(body)
        self._deadline = deadline
        self._timeout_s = timeout_s
        self.sent_at: float | None = None

    async def write(self, writer: AbstractStreamWriter) -> None:
        self.sent_at = time.monotonic()
        self._deadline.reschedule(asyncio.get_running_loop().time() + self._timeout_s)
        await writer.write(self._value)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.decode(encoding, errors)

    @property
    def latency_s(self) -> float:
        return 0.0 if self.sent_at is None else time.monotonic() - self.sent_at


class HttpConnection:
    """Keep-alive connections to one base URL, as many as there are calls. Lives on one event loop.

    A POST is never sent twice by itself: aiohttp resends idempotent methods only. Redirects are not followed, cookies
    not kept, ``.netrc`` not read; a proxy is used where the environment names one for this address.
    """

    def __init__(self, base_url: str, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._base = URL(base_url)
        if self._base.scheme not in ("http", "https") or not self._base.host:
            raise ConfigurationError(f"base_url {base_url!r} is not an http or https address")
        self._max_body_bytes = max_body_bytes
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._proxy: dict[str, Any] = {}

    @property
    def host(self) -> str:
        return self._base.host or ""

    async def start(self) -> None:
        """Opens the session on the running loop; connections are made when they are needed. Idempotent."""
        if self._session is not None:
            return
        self._proxy = _proxy_for(self._base)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=_NO_TIMEOUT,
            trust_env=False,  # would ask the environment in a thread for every call, and read .netrc
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        headers: CIMultiDict[str],
        timeout_s: float,
        listen: Callable[[int, Headers, float], Feed | None] | None = None,
    ) -> Reply:
        """Sends one POST. Raises a CallError whose ledger state says whether the server may have acted on it.

        ``timeout_s`` counts from sending to the last byte. ``listen`` gets status, headers and the moment of sending
        (``time.monotonic``); where it returns a function, that gets the body's pieces until it answers True.
        """
        if self._session is None:
            raise Unreachable(f"the connection to {self.host} is not open")
        deadline = asyncio.timeout(None)
        sent = _SentBody(body, deadline, timeout_s)
        try:
            async with (
                deadline,
                self._session.post(
                    self._url(path), data=sent, headers=headers, allow_redirects=False, **self._proxy
                ) as response,
            ):
                feed = listen(response.status, response.headers, sent.sent_at or 0.0) if listen else None
                answer = b"" if feed else await self._read(response)
                unfinished = feed is not None and await self._feed(response, feed)
                latency_s = sent.latency_s
                if unfinished:
                    await _drain(response)
            return Reply(status=response.status, headers=response.headers, body=answer, latency_s=latency_s)
        except aiohttp.ClientResponseError as e:
            # not chained: aiohttp's error shows the request's headers, and the key with them
            raise self._no_http(e.message, sent) from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise self._translated(e, sent, timeout_s) from e

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := await response.content.readany():
            size += len(piece)
            if size > self._max_body_bytes:
                raise self._too_big(response)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _feed(self, response: aiohttp.ClientResponse, feed: Feed) -> bool:
        """Passes the body on; True if the listener had heard enough before its end."""
        size = 0
        while piece := await response.content.readany():
            size += len(piece)
            if size > self._max_body_bytes:
                raise self._too_big(response)
            if feed(piece):
                return True
        return False

    def _too_big(self, response: aiohttp.ClientResponse) -> MalformedResponse:
        response.close()
        limit = self._max_body_bytes // (1024 * 1024)
        return MalformedResponse(f"{self.host} sent an answer of more than {limit} MB", http_status=response.status)

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._base.with_path(self._base.path.rstrip("/") + path, keep_query=True)
            self._urls[path] = url
        return url

    def _no_http(self, reason: str, sent: _SentBody) -> CallError:
        if sent.sent_at is None:  # a proxy that would not connect
            return Unreachable(f"{self.host} cannot be reached: {reason[:300]}")
        return MalformedResponse(f"{self.host} did not answer in HTTP: {reason[:300]}")

    def _translated(self, error: Exception, sent: _SentBody, timeout_s: float) -> CallError:
        latency_ms = round(sent.latency_s * 1000)
        reason = str(error) or type(error).__name__
        if sent.sent_at is None or isinstance(error, aiohttp.ClientConnectorError):
            return Unreachable(f"{self.host} cannot be reached: {reason[:300]}")
        if isinstance(error, TimeoutError):
            return CallTimeout(f"{self.host} did not answer within {timeout_s:g} s", latency_ms=latency_ms)
        return ConnectionLost(f"the connection to {self.host} broke: {reason[:300]}", latency_ms=latency_ms)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Waits a moment for the end that should follow the last event, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_LAST_PIECE_S):
            while await response.content.readany():
                pass
    except TimeoutError:
        response.close()


def _proxy_for(url: URL) -> dict[str, Any]:
    """Arguments that make a request use the proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name for ``url``.

    None for this host itself, which a proxy elsewhere would look for in vain.
    """
    if url.host in _THIS_HOST:
        return {}
    try:
        proxy, auth = get_env_proxy_for_url(url)
    except LookupError:
        return {}
    return {"proxy": proxy, "proxy_auth": auth}
