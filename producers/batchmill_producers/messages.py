"""Checks that a value is a list of chat messages in OpenAI's shape, and nothing else about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# A message may have no content when it carries one of these instead.
_CONTENT_STANDINS = ("tool_calls", "function_call", "refusal", "audio")


class InvalidMessages(ValueError):
    """A value that is not a list of chat messages; the message says which and why."""


def check_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The messages, unchanged. Raises InvalidMessages naming the first one that is wrong (counted from 1)."""
    if not isinstance(value, (list, tuple)):
        raise InvalidMessages(f"must be a list of messages, not {type(value).__name__}")
    if not value:
        raise InvalidMessages("is an empty list; at least one message is needed")
    for number, message in enumerate(value, 1):
        _check_message(number, message)
    return tuple(value)


def messages_in(text: str) -> tuple[Mapping[str, Any], ...]:
    """The messages that a text holds as JSON, for tables whose cells can hold nothing but text. Raises InvalidMessages."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessages("holds messages as JSON in the first row, and here a text that is no JSON") from error
    return check_messages(value)


def are_messages(value: object) -> bool:
    """Whether a cell is a text that holds messages as JSON."""
    if not isinstance(value, str):
        return False
    try:
        messages_in(value)
    except InvalidMessages:
        return False
    return True


def _check_message(number: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise InvalidMessages(f"message {number} is a {type(message).__name__}, not an object with role and content")
    if message.get("role") not in ROLES:
        raise InvalidMessages(f"message {number} has role {message.get('role')!r}; roles are {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and not any(message.get(k) for k in _CONTENT_STANDINS):
        raise InvalidMessages(f"message {number} has no content")
    if content is not None and not isinstance(content, (str, list)):
        raise InvalidMessages(
            f"message {number} has content of type {type(content).__name__}; it must be text or parts"
        )
    if isinstance(content, list) and not all(isinstance(p, Mapping) and "type" in p for p in content):
        raise InvalidMessages(f"message {number} has a part that is not an object with a type")
