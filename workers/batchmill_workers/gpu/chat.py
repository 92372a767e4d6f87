"""A request's chat messages as a local text model takes them: a role and one text each, and which tools were called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from batchmill_core.errors import InvalidRequest
from batchmill_core.request import Request, TaskKind

_NAMES = ("name", "tool_call_id")


def text_messages(request: Request, *, engine: str, task: TaskKind = TaskKind.CHAT) -> list[dict[str, Any]]:
    """The messages with their text parts joined. Raises InvalidRequest for what a text model cannot take.

    Calls of tools and whose answer a message is go on to the model's chat template, with the arguments as the table that
    templates expect and OpenAI writes as JSON.
    """
    if request.task is not task:
        raise InvalidRequest(f"engine {engine} answers {task.value} only, not {request.task.value}")
    if not request.messages:
        raise InvalidRequest("the request has no messages")
    return [_message(message, engine) for message in request.messages]


def _message(message: Mapping[str, Any], engine: str) -> dict[str, Any]:
    told: dict[str, Any] = {"role": _role(message), "content": _text(message, engine)}
    told |= {name: message[name] for name in _NAMES if isinstance(message.get(name), str)}
    if message.get("tool_calls"):
        told["tool_calls"] = _tool_calls(message["tool_calls"])
    return told


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
        raise InvalidRequest("a message's tool_calls are no list of calls")
    return [{**call, "function": _function(call.get("function"))} for call in calls]


def _function(function: Any) -> dict[str, Any]:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("a call among a message's tool_calls names no function")
    return {**function, "arguments": _arguments(function.get("arguments"))}


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return orjson.loads(arguments or "{}")
    except ValueError:
        return arguments  # a model wrote them, which may have failed: the template shows what it wrote


def _role(message: Mapping[str, Any]) -> str:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest("a message has no role")
    return role


def _text(message: Mapping[str, Any], engine: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"a message's content is a {type(content).__name__}; it must be a text or a list of parts")
    return "".join(_part(part, engine) for part in content)


def _part(part: Any, engine: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequest(f"engine {engine} reads text parts only; a message has a part of type {kind!r}")
