"""One chat request: what it asks, how many tokens it has, and the answer, all functions of its text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from .error_bodies import BadRequest
from .sentiment import sentiment
from .structured import instance

_TOKENS_PER_MESSAGE = 3
_TOKENS_PER_REPLY = 3
_TOKENS_PER_PART = 85  # an image in low detail
_PROMPT_CACHE_TOKENS = 1024  # providers cache prefixes from here on, in steps of 128
_SENTIMENT_WORDS = tuple(
    "sentiment positiv negativ review label classif stimmung bewertung rezension avis reseña opini recension avalia "  # noqa: SIM905
    "рецензи отзыв 评论 评价 レビュー 리뷰 समीक्षा مراجعة".split()
)
_OPENINGS = (
    "In short, this is about",
    "The text says that",
    "A brief answer:",
    "Here is what matters:",
    "Put simply,",
)


class ChatRequest(NamedTuple):
    """``prefix`` is the first message, by which prompts share a cache; ``text`` the last user message; ``instructions`` all."""

    prefix: str
    text: str
    instructions: str
    input_tokens: int
    max_tokens: int | None
    response_format: Mapping[str, Any] | None
    stream: bool
    include_usage: bool

    @property
    def cacheable_tokens(self) -> int:
        """Tokens of the first message that a provider would keep, 0 when it is short."""
        if len(self.prefix) < _PROMPT_CACHE_TOKENS:  # a token has at least one character
            return 0
        tokens = count_tokens(self.prefix)
        return tokens // 128 * 128 if tokens >= _PROMPT_CACHE_TOKENS else 0


def count_tokens(text: str) -> int:
    """The simulator's tokenizer: one token per four bytes of UTF-8, rounded up."""
    return (len(text) if text.isascii() else len(text.encode("utf-8"))) + 3 >> 2


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Reads the body of a chat completion. Raises BadRequest naming the parameter."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a list of at least one message.", param="messages")
    texts, tokens = [], _TOKENS_PER_REPLY
    user_text = ""
    for position, message in enumerate(messages):
        text, extra = _message_text(message, position)
        texts.append(text)
        tokens += _TOKENS_PER_MESSAGE + extra + count_tokens(text)
        if message.get("role") == "user":
            user_text = text
    options = body.get("stream_options")
    return ChatRequest(
        prefix=texts[0],
        text=user_text or texts[-1],
        instructions="\n".join(texts),
        input_tokens=tokens,
        max_tokens=_max_tokens(body),
        response_format=_response_format(body),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def answer(request: ChatRequest) -> tuple[str, str, int]:
    """The answer's text, finish reason (``stop`` or ``length``) and output tokens."""
    text = _full_answer(request)
    tokens = max(1, count_tokens(text))
    if request.max_tokens is None or tokens <= request.max_tokens:
        return text, "stop", tokens
    kept = text.encode()[: request.max_tokens * 4].decode(errors="ignore")
    return kept, "length", request.max_tokens


def _full_answer(request: ChatRequest) -> str:
    wanted = request.response_format
    if wanted is not None and wanted.get("type") in ("json_schema", "json_object"):
        return _json_answer(request, wanted)
    asked = request.instructions.lower()
    if any(word in asked for word in _SENTIMENT_WORDS):
        return sentiment(request.text)
    gist = " ".join(request.text.split()[:40])[:400]
    return f"{_OPENINGS[crc32(request.text.encode()) % len(_OPENINGS)]} {gist}"


def _json_answer(request: ChatRequest, wanted: Mapping[str, Any]) -> str:
    label = sentiment(request.text)
    if wanted["type"] == "json_object":
        return orjson.dumps({"label": label}).decode()
    schema = wanted["json_schema"]["schema"]
    return orjson.dumps(instance(schema, label=label, text=request.text)).decode()


def _message_text(message: Any, position: int) -> tuple[str, int]:
    """The text of a message, and the tokens of what in it is not text."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return content, 0
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        return "".join(texts), _TOKENS_PER_PART * (len(content) - len(texts))
    if isinstance(message, dict) and content is None and message.get("role") == "assistant":
        return "", 0
    raise BadRequest(
        f"Invalid value for 'messages[{position}]': expected an object with a string or a list of parts as 'content'.",
        param=f"messages[{position}].content",
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"Invalid '{name}': expected an integer of at least 1, got {value!r}.", param=name)
        return value
    return None


def _response_format(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = body.get("response_format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") not in ("text", "json_object", "json_schema"):
        raise BadRequest(
            "'response_format.type' must be text, json_object or json_schema.", param="response_format.type"
        )
    named = wanted.get("json_schema")
    if wanted["type"] == "json_schema" and not (isinstance(named, dict) and isinstance(named.get("schema"), dict)):
        raise BadRequest(
            "Missing required parameter: 'response_format.json_schema.schema'.", param="response_format.json_schema"
        )
    return wanted
