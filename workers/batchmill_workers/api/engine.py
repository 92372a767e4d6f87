"""ApiEngine: one provider account as an Engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from multidict import CIMultiDict

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.errors import CallError, ConfigurationError, UserError
from batchmill_core.request import Completion, Request, TaskKind

from .http import MAX_BODY_BYTES, Feed, HttpConnection, Reply
from .quota import Quota
from .sse import StreamedAnswer
from .wire import body_of, parse_chat, parse_embeddings, path_for

_EVENT_STREAM = "text/event-stream"
_USER_AGENT = "batchmill"


class ApiEngine:
    """Answers requests by calls to one account, any number at a time on one event loop.

    ``complete`` only sends; who may send is asked of ``quota`` first: ``async with engine.quota.admit(model, tokens)``.
    What calls tell about the account's health flows back into the quota by itself. ``read_key`` gives the account's key
    (None: the server wants none); it is asked again after a 401, so that a key can be changed under a running worker.
    ``models`` are the catalogue's entries of this account, for limits and timeouts of their own.
    """

    context_tokens: int | None = None

    def __init__(
        self, account: Account, read_key: Callable[[], str | None], *, models: Iterable[ModelEntry] = ()
    ) -> None:
        entries = tuple(models)
        self.account = account
        self.capacity_rows = account.max_in_flight
        self.quota = Quota(
            account.limits, max_in_flight=account.max_in_flight, models={e.upstream: e.limits for e in entries}
        )
        self._timeouts_s = {e.upstream: e.timeout_s for e in entries if e.timeout_s is not None}
        self._http = HttpConnection(account.base_url, max_body_bytes=MAX_BODY_BYTES)
        self._read_key = read_key
        self._key: str | None = None
        self._headers: CIMultiDict[str] = CIMultiDict()

    @property
    def in_flight(self) -> int:
        """Calls that were let in and have not ended."""
        return self.quota.in_flight

    @property
    def throttled_until(self) -> float | None:
        """When sending goes on, in seconds since the epoch; None when nothing holds it up."""
        paused_s = self.quota.paused_s
        return time.time() + paused_s if paused_s > 0 else None

    async def start(self) -> None:
        """Opens the session and reads the key. Raises ConfigurationError if the key is missing."""
        self._use_key(self._read_key())
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()

    async def complete(self, request: Request) -> Completion:
        """One call, sent once (once more with the new key, if the old one was refused and has changed)."""
        try:
            completion = await self._call(request)
        except CallError as error:
            self._hide_key(error)
            self.quota.failed(error)
            raise
        self.quota.succeeded(latency_s=completion.latency_ms / 1000)
        return completion

    async def _call(self, request: Request) -> Completion:
        body = body_of(request)
        headers = self._headers
        reply, stream = await self._send(request, body, headers)
        if reply.status == 401 and self._renewed(headers):
            reply, stream = await self._send(request, body, self._headers)
        latency_ms = round(reply.latency_s * 1000)
        if stream is not None:
            return stream.finish(latency_ms=latency_ms)
        return _parsed(reply, request, latency_ms)

    async def _send(
        self, request: Request, body: bytes, headers: CIMultiDict[str]
    ) -> tuple[Reply, _TimedStream | None]:
        if request.idempotency_key is not None:
            headers = headers.copy()
            headers["Idempotency-Key"] = request.idempotency_key
        stream = _TimedStream() if request.stream and request.task is not TaskKind.EMBED else None
        reply = await self._http.post(
            path_for(request),
            body,
            headers=headers,
            timeout_s=self._timeouts_s.get(request.model, self.account.timeout_s),
            listen=None if stream is None else stream.open,
        )
        return reply, stream if stream is not None and stream.is_open else None

    # the key

    def _renewed(self, refused: CIMultiDict[str]) -> bool:
        """Whether there is another key than the one in ``refused``; asks for it once for all calls that were refused."""
        if refused is not self._headers:
            return True
        try:
            self._use_key(self._read_key())
        except UserError:
            return False  # the refusal that came first says more
        return self._headers is not refused

    def _use_key(self, key: str | None) -> None:
        key = key.strip() if key else None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigurationError(f"the key of account {self.account.name} has characters that no header can carry")
        if self._headers and key == self._key:
            return
        headers = CIMultiDict({"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"})
        if key is not None and self._http.host.endswith(".azure.com"):
            headers["api-key"] = key
        elif key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._key, self._headers = key, headers

    def _hide_key(self, error: CallError) -> None:
        """Some servers repeat the key they refuse; it must not reach a log, a result, the ledger or the screen."""
        told = (error.message, error.raw, error.request_id)
        if self._key and any(self._key in text for text in told if text):
            error.message = error.message.replace(self._key, "***")
            error.raw = error.raw.replace(self._key, "***") if error.raw else error.raw
            error.request_id = error.request_id.replace(self._key, "***") if error.request_id else None
            error.args = (error.message,)


class _TimedStream:
    """A streamed answer that notes when its first token came."""

    def __init__(self) -> None:
        self._answer: StreamedAnswer | None = None
        self._sent_at = 0.0
        self._ttft_ms: int | None = None

    @property
    def is_open(self) -> bool:
        return self._answer is not None

    def open(self, status: int, headers: Mapping[str, str], sent_at: float) -> Feed | None:
        """Takes the answer if it is a stream; errors and plain answers are read as a whole."""
        if status != 200 or not _is_stream(headers):
            return None
        self._answer, self._sent_at = StreamedAnswer(status, headers), sent_at
        return self._feed

    def finish(self, *, latency_ms: int) -> Completion:
        assert self._answer is not None
        return self._answer.finish(now=time.time(), latency_ms=latency_ms, ttft_ms=self._ttft_ms)

    def _feed(self, piece: bytes) -> bool:
        answer = self._answer
        assert answer is not None
        answer.feed(piece)
        if self._ttft_ms is None and answer.begun:
            self._ttft_ms = round((time.monotonic() - self._sent_at) * 1000)
        return answer.done


def _parsed(reply: Reply, request: Request, latency_ms: int) -> Completion:
    now = time.time()
    if request.task is TaskKind.EMBED:
        return parse_embeddings(reply.status, reply.headers, reply.body, request, now=now, latency_ms=latency_ms)
    if reply.status == 200 and _is_stream(reply.headers):  # some servers stream whether asked or not
        answer = StreamedAnswer(reply.status, reply.headers)
        answer.feed(reply.body)
        return answer.finish(now=now, latency_ms=latency_ms)
    return parse_chat(reply.status, reply.headers, reply.body, request, now=now, latency_ms=latency_ms)


def _is_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").startswith(_EVENT_STREAM)
