"""Reads lines of an OpenAI batch file: recognises them, checks them, turns each into a Request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill_core.request import Request, TaskKind

from .messages import InvalidMessages, check_messages

_TASKS = {"/v1/chat/completions": TaskKind.CHAT, "/v1/embeddings": TaskKind.EMBED}
# Batchmill fills in the model from the job; the rest of these is not a parameter of the call.
_NOT_PARAMETERS = frozenset({"model", "messages", "input", "stream", "stream_options"})


class InvalidBatchLine(ValueError):
    """A line of an OpenAI batch file that cannot become a request; the message says why."""


def is_batch_line(value: Mapping[str, Any]) -> bool:
    """Whether a row is a line of an OpenAI batch file: method, url, and a body with a model."""
    body = value.get("body")
    return isinstance(value.get("url"), str) and "method" in value and isinstance(body, Mapping) and "model" in body


def batch_request(value: Mapping[str, Any]) -> Request:
    """The request in one line. Raises InvalidBatchLine saying what is wrong and what to do."""
    body = value.get("body")
    if not isinstance(body, Mapping):
        raise InvalidBatchLine("not a line of an OpenAI batch file like those before: it has no 'body' object")
    task = _task(value)
    _check_single_answer(body)
    params = {k: v for k, v in body.items() if k not in _NOT_PARAMETERS}
    if task is TaskKind.EMBED:
        return Request(task=task, inputs=(_embedding_input(body),), params=params)
    try:
        messages = check_messages(body.get("messages"))
    except InvalidMessages as error:
        raise InvalidBatchLine(f"body.messages: {error}") from error
    return Request(task=task, messages=messages, params=params)


def _task(value: Mapping[str, Any]) -> TaskKind:
    method, url = value.get("method"), value.get("url")
    if not isinstance(method, str) or method.upper() != "POST":
        raise InvalidBatchLine(f"method is {method!r}; only POST can be answered")
    if url not in _TASKS:
        raise InvalidBatchLine(f"url {url!r} cannot be answered; those that can: {', '.join(_TASKS)}")
    return _TASKS[url]


def _check_single_answer(body: Mapping[str, Any]) -> None:
    if body.get("stream"):
        raise InvalidBatchLine("body.stream is true; batch requests are not streamed, so take it out")
    if body.get("n") not in (None, 1):
        raise InvalidBatchLine(f"body.n is {body['n']!r}; a row has one answer, so give one line for each")


def _embedding_input(body: Mapping[str, Any]) -> str:
    given = body.get("input")
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if isinstance(given, list) and all(isinstance(v, str) for v in given):
        raise InvalidBatchLine(f"body.input holds {len(given)} texts; a row has one vector, so give one line for each")
    if not isinstance(given, str):
        raise InvalidBatchLine(f"body.input must be a text, not {type(given).__name__}")
    return given
