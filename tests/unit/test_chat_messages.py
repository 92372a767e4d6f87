"""Chat messages in OpenAI's shape as local engines hand them to a model's chat template."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill_core.errors import InvalidRequest
from batchmill_core.request import Request
from batchmill_workers.gpu.chat import text_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'}}


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return text_messages(Request(messages=messages), engine="transformers")


def test_text_parts_become_one_text_and_no_content_an_empty_one() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]

    assert read({"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "user"}) == [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_calls_of_tools_and_their_answers_reach_the_template() -> None:
    called, answered = read(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "weather"},
    )

    assert called["tool_calls"][0] == {
        **CALL,
        "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
    }
    assert answered == {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "weather"}


@pytest.mark.parametrize(
    ("written", "told"), [("", {}), (None, {}), ({"a": 1}, {"a": 1}), ("{not JSON", "{not JSON")], ids=str
)
def test_arguments_are_what_a_template_can_read(written: Any, told: Any) -> None:
    call = {"function": {"name": "f", "arguments": written}}
    (message,) = read({"role": "assistant", "tool_calls": [call]})

    assert message["tool_calls"][0]["function"]["arguments"] == told


@pytest.mark.parametrize("calls", ["f()", [1], [{"id": "c1"}], [{"function": {"arguments": "{}"}}]], ids=str)
def test_calls_that_name_no_function_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_calls"):
        read({"role": "assistant", "content": "", "tool_calls": calls})


def test_a_message_without_calls_says_nothing_of_them() -> None:
    assert read({"role": "assistant", "content": "x", "tool_calls": [], "refusal": None, "name": None}) == [
        {"role": "assistant", "content": "x"}
    ]
