"""Chat messages as the token ids of a prompt: the model's chat template, applied once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from batchmill_core.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]


def prompt_tokens(
    tokenizer: Any, messages: Messages, *, template: str | None = None, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of the messages in ``template`` (None: the tokenizer's own), ready for the assistant's turn.

    ``variables`` are further ones that the template knows, such as ``enable_thinking``. The template writes the special
    tokens itself, so that none is added: a second start token changes answers. A template that refuses a system message
    gets its text at the head of the first user message. Raises InvalidRequest for messages that it refuses all the same.
    """
    try:
        text = _rendered(tokenizer, messages, template, variables or {})
    except jinja2.TemplateError as error:
        merged = without_system(messages)
        if merged == list(messages):
            raise _refusal(error) from error
        try:
            text = _rendered(tokenizer, merged, template, variables or {})
        except jinja2.TemplateError as again:
            raise _refusal(again) from again
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def without_system(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages with a leading system message's text put before that of the first user message."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    system, rest = messages[0]["content"], list(messages[1:])
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system}, *rest]


def _rendered(tokenizer: Any, messages: Messages, template: str | None, variables: Mapping[str, Any]) -> str:
    ours = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    text: str = tokenizer.apply_chat_template(list(messages), **{**variables, **ours})
    return text


def _refusal(error: jinja2.TemplateError) -> InvalidRequest:
    return InvalidRequest(f"the model's chat template refuses the messages: {error}")
