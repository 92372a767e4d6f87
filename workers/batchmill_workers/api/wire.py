"""The OpenAI-compatible protocol, without I/O: a Request to bytes, an answer's bytes to a Completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson

from batchmill_core.errors import CallError, InvalidRequest, MalformedResponse, Unavailable
from batchmill_core.request import Completion, Request, TaskKind
from batchmill_core.usage import Usage

from .faults import error_of
from .headers import request_id_of
from .json_body import parse, start_of
from .reported import usage_of
from .vectors import vectors_of

_FINISH_REASONS = {
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "safety": "content_filter",
    "recitation": "content_filter",
    "prohibited_content": "content_filter",
    "blocklist": "content_filter",
    "sensitive": "content_filter",
    "end_turn": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
}
_MAY_BE_EMPTY = frozenset({"length", "content_filter"})
# the provider says that the answer is not whole: DeepSeek, vLLM, OpenRouter
_BROKEN_OFF = frozenset({"insufficient_system_resource", "abort", "error", "network_error"})


def path_for(request: Request) -> str:
    """The path below the account's base URL."""
    return "/embeddings" if request.task is TaskKind.EMBED else "/chat/completions"


def body_of(request: Request) -> bytes:
    """The JSON body of a request. Raises InvalidRequest if its parameters or messages are not JSON.

    The row's own parameters win over what is implied (``response_format`` of a schema, ``encoding_format``), never over
    the model.
    """
    body = _embedding_body(request) if request.task is TaskKind.EMBED else _chat_body(request)
    try:
        return orjson.dumps(body, default=_plain)
    except (TypeError, RecursionError) as e:
        raise InvalidRequest(f"the request cannot be written as JSON: {e}") from e


def _chat_body(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {"model": request.model, "messages": request.messages, **request.params}
    body["model"] = request.model
    if request.schema is not None:
        answer = {"name": "answer", "schema": request.schema}
        body.setdefault("response_format", {"type": "json_schema", "json_schema": answer})
    if request.stream:
        body["stream"] = True
        body.setdefault("stream_options", {"include_usage": True})
    return body


def _embedding_body(request: Request) -> dict[str, Any]:
    # base64 is 4 bytes to 5.3 characters and parsed at memory speed; servers that ignore it send numbers
    body = {"encoding_format": "base64", **request.params}
    body["model"], body["input"] = request.model, request.inputs
    return body


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def parse_chat(
    status: int, headers: Mapping[str, str], body: bytes, request: Request, *, now: float, latency_ms: int = 0
) -> Completion:
    """The completion of a chat answer that came in one piece. Raises a CallError if it is none.

    ``now`` (seconds since the epoch) is only used where an error names a date.
    """
    answer = _answer(status, headers, body, now=now, latency_ms=latency_ms)
    usage = usage_of(answer.get("usage"))
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise malformed("an answer without choices", body, headers, usage=usage, latency_ms=latency_ms)
    if choice.get("error"):
        raise error_midway(status, headers, choice["error"], answer.get("usage"), now=now, latency_ms=latency_ms)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise malformed("a choice without a message", body, headers, usage=usage, latency_ms=latency_ms)
    finish = finish_of(choice.get("finish_reason"))
    text, refusal = text_of(message)
    completion = Completion(
        text=text,
        finish_reason=finish,
        refusal=refusal,
        usage=usage,
        latency_ms=latency_ms,
        model=_string(answer.get("model")),
        request_id=request_id_of(headers) or _string(answer.get("id")),
    )
    check_whole(completion, body)
    return completion


def check_whole(completion: Completion, body: bytes) -> None:
    """Raises a CallError if the provider broke the answer off, or if it says nothing and gives no reason."""
    kind: type[CallError]
    if completion.finish_reason in _BROKEN_OFF:
        kind, message = Unavailable, f"the provider broke the answer off ({completion.finish_reason})"
    elif completion.text is None and not completion.refusal and completion.finish_reason not in _MAY_BE_EMPTY:
        kind, message = MalformedResponse, "the answer has neither text nor a reason for having none"
    else:
        return
    raise kind(
        message,
        usage=completion.usage,
        raw=start_of(body),
        request_id=completion.request_id,
        http_status=200,
        latency_ms=completion.latency_ms,
    )


def parse_embeddings(
    status: int, headers: Mapping[str, str], body: bytes, request: Request, *, now: float, latency_ms: int = 0
) -> Completion:
    """The vectors of an embedding answer in the order of ``request.inputs``, as float32 little-endian bytes.

    Raises MalformedResponse if they are not exactly one per input and of one length: vectors are never shifted.
    """
    answer = _answer(status, headers, body, now=now, latency_ms=latency_ms)
    usage = usage_of(answer.get("usage"), has_output=False)
    try:
        vectors = vectors_of(answer.get("data"), len(request.inputs))
    except ValueError as e:
        raise malformed(f"embeddings that do not fit: {e}", body, headers, usage=usage, latency_ms=latency_ms) from e
    return Completion(
        vectors=vectors,
        finish_reason="stop",
        usage=usage,
        latency_ms=latency_ms,
        model=_string(answer.get("model")),
        request_id=request_id_of(headers) or _string(answer.get("id")),
    )


def _answer(status: int, headers: Mapping[str, str], body: bytes, *, now: float, latency_ms: int) -> dict[str, Any]:
    """The JSON object of a good answer; raises the error that any other one is."""
    if status != 200 and not 200 <= status < 300:
        raise error_of(status, headers, body, now=now, latency_ms=latency_ms)
    try:
        answer = parse(body)
    except ValueError as e:
        raise malformed(f"an answer that is not JSON: {e}", body, headers, latency_ms=latency_ms) from e
    if isinstance(answer, list) and answer and isinstance(answer[0], dict) and answer[0].get("error"):
        raise error_of(status, headers, body, now=now, latency_ms=latency_ms)
    if not isinstance(answer, dict):
        raise malformed("an answer that is not a JSON object", body, headers, latency_ms=latency_ms)
    if answer.get("error") or answer.get("object") == "error" or answer.get("type") == "error":
        raise error_of(status, headers, body, now=now, latency_ms=latency_ms)
    return answer


def error_midway(
    status: int, headers: Mapping[str, str], error: Any, usage: Any, *, now: float, latency_ms: int
) -> CallError:
    """The error of a call whose model had begun to answer: it may have been billed, whatever the error is.

    OpenRouter puts such an error into the choice of a 200, streams send it as an event.
    """
    body = json.dumps({"error": error, "usage": usage}).encode()
    return error_of(status, headers, body, now=now, started=True, latency_ms=latency_ms)


def text_of(message: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Text and refusal of a message or delta. Tool calls, where there is no text, are its text, as JSON."""
    content = message.get("content")
    refusal = _string(message.get("refusal"))
    if isinstance(content, list):
        content, refused = _joined(content)
        refusal = refusal or refused
    calls = message.get("tool_calls")
    if not content and isinstance(calls, list) and calls:
        content = json.dumps(calls, ensure_ascii=False)
    return (content if isinstance(content, str) else None), refusal


def _joined(parts: list[Any]) -> tuple[str | None, str | None]:
    texts = [p if isinstance(p, str) else p.get("text") for p in parts if isinstance(p, str | dict)]
    said = [t for t in texts if isinstance(t, str)]
    refusals = [_string(p.get("refusal")) for p in parts if isinstance(p, dict)]
    return ("".join(said) if said else None), next((r for r in refusals if r), None)


def finish_of(reason: Any) -> str | None:
    """OpenAI's word for a finish reason."""
    if not isinstance(reason, str):
        return None
    lower = reason.lower()
    return _FINISH_REASONS.get(lower, lower)


def malformed(
    what: str, body: bytes, headers: Mapping[str, str], *, usage: Usage | None = None, latency_ms: int | None = None
) -> MalformedResponse:
    return MalformedResponse(
        f"the provider sent {what}",
        usage=usage,
        raw=start_of(body),
        request_id=request_id_of(headers),
        http_status=200,
        latency_ms=latency_ms,
    )


def _string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
