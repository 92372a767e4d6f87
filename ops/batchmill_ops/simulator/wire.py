"""From an answer to the bytes of its HTTP reply, with the faults that spoil a body."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from .connection import Ending, Reply, head
from .error_bodies import JSON
from .prices import CHAT_MODEL, EMBED_MODEL

_MAX_STREAM_CHUNKS = 16
_FIRST_TOKEN_SHARE = 0.3  # of a streamed call's latency
_CHAT_BODY = (
    b'{"id":"%b","object":"chat.completion","created":%d,"model":"' + CHAT_MODEL.encode() + b'","choices":%b%b}'
)
_CHAT_CHOICES = (
    b'[{"index":0,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":null,"finish_reason":"%b"}]'
)
_CHAT_USAGE = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
_LAST_CHUNK = b"0\r\n\r\n"


class Sending(NamedTuple):
    """What a reply needs apart from its answer. ``headers`` are whole header lines; ``fault`` spoils the body."""

    call_id: str
    latency_s: float
    headers: str
    fault: str | None


class ChatAnswer(NamedTuple):
    text: str
    finish_reason: str
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.input_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.input_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_input_tokens},
        }


def chat_reply(answer: ChatAnswer, sending: Sending) -> Reply:
    """A whole chat completion. Only the answer's text needs an encoder; the rest is filled into place."""
    choices = _CHAT_CHOICES % (orjson.dumps(answer.text), answer.finish_reason.encode())
    if sending.fault in ("malformed", "empty"):
        choices = orjson.dumps(spoiled([], sending.fault))
    tokens = (answer.input_tokens, answer.output_tokens, answer.input_tokens + answer.output_tokens)
    usage = b"" if sending.fault == "nousage" else _CHAT_USAGE % (*tokens, answer.cached_input_tokens)
    return _body_reply(_CHAT_BODY % (sending.call_id.encode(), int(time.time()), choices, usage), sending)


def embedding_reply(data: list[dict[str, Any]], input_tokens: int, sending: Sending) -> Reply:
    """A whole answer to an embedding call."""
    body: dict[str, Any] = {
        "object": "list",
        "data": spoiled(data, sending.fault),
        "model": EMBED_MODEL,
        "usage": {"prompt_tokens": input_tokens, "total_tokens": input_tokens},
    }
    if sending.fault == "nousage":
        del body["usage"]
    return _body_reply(orjson.dumps(body), sending)


def stream_reply(answer: ChatAnswer, sending: Sending, *, include_usage: bool) -> Reply:
    """A chat completion as server-sent events in HTTP chunks; a cut one lacks its second half and its end."""
    events = _events(answer, sending, include_usage=include_usage)
    parts = [head(200, "text/event-stream; charset=utf-8", length=None, extra=sending.headers) + _http_chunk(events[0])]
    parts += [_http_chunk(event) for event in events[1:]]
    first_s = sending.latency_s * _FIRST_TOKEN_SHARE
    gap_s = (sending.latency_s - first_s) / max(1, len(parts) - 1)
    if sending.fault == "cut":
        return Reply(tuple(parts[: max(1, len(parts) // 2)]), first_s, gap_s, Ending.CLOSE)
    parts[-1] += _LAST_CHUNK
    return Reply(tuple(parts), first_s, gap_s)


def json_reply(value: Any) -> Reply:
    body = orjson.dumps(value)
    return Reply((head(200, JSON, length=len(body)) + body,))


def error_reply(status: int, content_type: str, body: bytes, *, headers: str = "", delay_s: float = 0.0) -> Reply:
    return Reply((head(status, content_type, length=len(body), extra=headers) + body,), delay_s)


def spoiled(items: list[dict[str, Any]], fault: str | None) -> list[dict[str, Any]] | None:
    """The list that carries an answer, as a fault leaves it."""
    if fault == "malformed":
        return None
    return [] if fault == "empty" else items


def _body_reply(body: bytes, sending: Sending) -> Reply:
    start = head(200, JSON, length=len(body), extra=sending.headers)
    if sending.fault == "cut":
        return Reply((start + body[: len(body) // 2],), sending.latency_s, 0.0, Ending.CLOSE)
    return Reply((start + body,), sending.latency_s)


def _events(answer: ChatAnswer, sending: Sending, *, include_usage: bool) -> list[bytes]:
    frame = {"id": sending.call_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": CHAT_MODEL}
    if include_usage and sending.fault != "nousage":
        frame["usage"] = None
    choices: list[list[dict[str, Any]] | None] = [_choice({"role": "assistant", "content": "", "refusal": None})]
    choices += [_choice({"content": piece}) for piece in _pieces(answer.text)]
    choices += [_choice({}, answer.finish_reason)]
    if sending.fault in ("malformed", "empty"):
        choices = [spoiled([], sending.fault)]
    events = [_event({**frame, "choices": choice}) for choice in choices]
    if "usage" in frame:
        events.append(_event({**frame, "choices": [], "usage": answer.usage}))
    return [*events, b"data: [DONE]\n\n"]


def _choice(delta: Mapping[str, Any], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]


def _pieces(text: str) -> Sequence[str]:
    """The text in at most 16 pieces of at least four characters, as tokens arrive."""
    size = max(4, -(-len(text) // _MAX_STREAM_CHUNKS))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
