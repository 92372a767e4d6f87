"""A request's chat messages as a local text model takes them: a role and one text each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill_core.errors import InvalidRequest
from batchmill_core.request import Request, TaskKind


def text_messages(request: Request, *, engine: str, task: TaskKind = TaskKind.CHAT) -> list[dict[str, str]]:
    """The messages with their text parts joined. Raises InvalidRequest for what a text model cannot take."""
    if request.task is not task:
        raise InvalidRequest(f"engine {engine} answers {task.value} only, not {request.task.value}")
    if not request.messages:
        raise InvalidRequest("the request has no messages")
    return [{"role": _role(message), "content": _text(message, engine)} for message in request.messages]


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
