"""Counting tokens without a tokenizer: the bound holds, the range is plausible."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill_core.request import Request, TaskKind
from batchmill_core.tokens import (
    CONVERSATION_TOKENS,
    IMAGE_TOKENS,
    MESSAGE_TOKENS,
    TOOLS_TOKENS,
    UNSEEN_PART_TOKENS,
    estimate_text_tokens,
    estimate_tokens,
    upper_bound_tokens,
)


def chat(content: Any, **params: Any) -> Request:
    return Request(messages=({"role": "user", "content": content},), params=params)


def around(content: Any) -> int:
    """What the bound adds around a content of no length."""
    return CONVERSATION_TOKENS + MESSAGE_TOKENS + len("user")


@pytest.mark.parametrize("text", ["", "hello world", "čaj", "数据", "😀", "a\ud800b"])
def test_bound_of_a_text_is_its_bytes_and_the_chat_template(text: str) -> None:
    assert upper_bound_tokens(chat(text)) == len(text.encode("utf-8", "surrogatepass")) + around(text)


def test_bound_of_an_embedding_is_the_sum_over_its_texts() -> None:
    request = Request(task=TaskKind.EMBED, inputs=("abc", "é"))

    assert upper_bound_tokens(request) == 3 + 2 + 2 * MESSAGE_TOKENS


def test_image_counts_the_same_however_long_its_data() -> None:
    small = chat([{"type": "image_url", "image_url": {"url": "https://host/x.png"}}])
    large = chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}])

    assert upper_bound_tokens(small) == upper_bound_tokens(large) == IMAGE_TOKENS + around("")


def test_part_that_cannot_be_seen_counts_as_the_largest_context() -> None:
    assert upper_bound_tokens(chat([{"type": "file", "file": {"file_id": "f"}}])) > UNSEEN_PART_TOKENS


def test_tools_and_schemas_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 100}}]

    assert upper_bound_tokens(chat("a", tools=tools)) > upper_bound_tokens(chat("a")) + 100 + TOOLS_TOKENS
    assert upper_bound_tokens(chat("a", temperature=0.5)) == upper_bound_tokens(chat("a"))


def test_tool_calls_of_a_message_count() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 500}}
    request = Request(messages=({"role": "assistant", "content": None, "tool_calls": [call]},))

    assert upper_bound_tokens(request) > 500


# Counts by gpt2, cl100k_base and o200k_base, from OpenAI's cookbook page "How to count tokens with tiktoken".
KNOWN = [
    ("antidisestablishmentarianism", 5),
    ("antidisestablishmentarianism", 6),
    ("お誕生日おめでとう", 14),
    ("お誕生日おめでとう", 9),
    ("お誕生日おめでとう", 8),
]


@pytest.mark.parametrize(("text", "tokens"), KNOWN)
def test_range_holds_known_counts(text: str, tokens: int) -> None:
    low, high = estimate_text_tokens(text)

    assert low <= tokens <= high


@pytest.mark.parametrize(
    "text",
    ["a long English sentence " * 20, "这是一个关于产品的评论" * 20, "очень хороший товар " * 20, "😀🎉" * 20, "é"],
)
def test_range_is_ordered_and_below_the_bound(text: str) -> None:
    low, high = estimate_tokens(chat(text))

    assert 0 < low <= high <= upper_bound_tokens(chat(text))


def test_chinese_takes_more_tokens_per_character_than_english() -> None:
    english, chinese = estimate_text_tokens("a" * 300), estimate_text_tokens("数" * 300)

    assert chinese[0] > english[0]
    assert chinese[1] > english[1]


def test_estimate_counts_parts_of_a_message() -> None:
    low, high = estimate_tokens(chat([{"type": "text", "text": "a" * 550}, {"type": "image_url", "image_url": {}}]))

    assert low > 100 + 85
    assert high < 550 + 1700
