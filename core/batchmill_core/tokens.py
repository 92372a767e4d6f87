"""Counts tokens without a tokenizer to download: an upper bound for budgets and a plausible range for estimates.

The bound rests on byte-level BPE, which nearly every current model uses: a token is at least one byte of UTF-8, so a
text has at most as many tokens as bytes. Chat templates add tokens around it; the figures below are above every
template of OpenAI, Llama 3, Qwen 2.5 and 3, Mistral, Gemma, SmolLM2 and DeepSeek, the system texts included that
some of them put in when a conversation has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from .request import Request

CONVERSATION_TOKENS = 128
MESSAGE_TOKENS = 16
TOOLS_TOKENS = 1024
# The dearest known image: one in high detail at gpt-4o-mini, 2833 + 8 tiles of 5667.
IMAGE_TOKENS = 48_169
# A document or video behind a link cannot be seen from here; no model on the market reads more than this.
UNSEEN_PART_TOKENS = 2_000_000
# What is sent to a model as text of the prompt although it is a parameter.
_PROMPT_PARAMS = ("tools", "functions", "response_format")
_IMAGE_PARTS = frozenset({"image_url", "image", "input_image"})
_LIKELY_IMAGE_TOKENS = (85, 1600)
_LIKELY_MESSAGE_TOKENS = (3, 8)
_LIKELY_CONVERSATION_TOKENS = (1, 40)
# Characters per token, (most, fewest), by how many bytes of UTF-8 a character takes: prose to code and numbers for
# ASCII; accents, Cyrillic, Arabic; Chinese, Japanese, Korean, Thai; emoji. New vocabularies stand at the first
# figure, small or English ones at the second.
_CHARS_PER_TOKEN = {1: (5.5, 2.2), 2: (4.0, 0.8), 3: (2.0, 0.4), 4: (1.0, 0.25)}


def upper_bound_tokens(request: Request) -> int:
    """At most so many input tokens will be billed for the request, by any byte-level BPE tokenizer.

    An image counts as 48,169 tokens, audio as the length of its base64 data, another part that cannot be seen (a file, a
    video, a link) as 2,000,000.
    """
    if request.inputs:
        return sum(_utf8_bytes(text) + MESSAGE_TOKENS for text in request.inputs)
    total = CONVERSATION_TOKENS
    for message in request.messages:
        total += MESSAGE_TOKENS
        for key, value in message.items():
            total += _bound(value) if key == "content" else _json_bytes(value) if key != "role" else len(value)
    return total + _params_bound(request.params) + (0 if request.schema is None else _json_bytes(request.schema))


def estimate_tokens(request: Request) -> tuple[int, int]:
    """A range, low and high, in which the request's input tokens plausibly lie; for estimates, not for budgets."""
    low, high = 0.0, 0.0
    if not request.inputs:
        low, high = _LIKELY_CONVERSATION_TOKENS
    for text in request.inputs:
        low, high = _plus((low, high), _text_range(text))
    for message in request.messages:
        low, high = _plus((low, high), _LIKELY_MESSAGE_TOKENS)
        low, high = _plus((low, high), _content_range(message.get("content")))
    extra = sum(_json_bytes(request.params[k]) for k in _PROMPT_PARAMS if k in request.params)
    return max(1, int(low + extra / 6)), max(1, int(high + extra / 2) + 1)


def estimate_text_tokens(text: str) -> tuple[int, int]:
    """A range, low and high, of the tokens of one text."""
    low, high = _text_range(text)
    return int(low), int(high) + 1


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _json_bytes(value: Any) -> int:
    if value is None:
        return 0
    try:
        return len(orjson.dumps(value)) + MESSAGE_TOKENS
    except TypeError:  # integers beyond 64 bits and lone surrogates, which orjson refuses
        return len(repr(value)) * 4 + MESSAGE_TOKENS


def _bound(content: Any) -> int:
    if isinstance(content, str):
        return _utf8_bytes(content)
    if not isinstance(content, list):
        return _json_bytes(content)
    return sum(_part_bound(part) for part in content)


def _part_bound(part: Mapping[str, Any]) -> int:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        return _json_bytes(part)
    if kind in _IMAGE_PARTS:
        return IMAGE_TOKENS
    if kind == "input_audio":
        return _json_bytes(part)
    return UNSEEN_PART_TOKENS


def _params_bound(params: Mapping[str, Any]) -> int:
    total = sum(_json_bytes(params[k]) for k in _PROMPT_PARAMS if k in params)
    return total + TOOLS_TOKENS if total else 0


def _content_range(content: Any) -> tuple[float, float]:
    if isinstance(content, str):
        return _text_range(content)
    total = (0.0, 0.0)
    for part in content if isinstance(content, list) else ():
        if part.get("type") in _IMAGE_PARTS:
            total = _plus(total, _LIKELY_IMAGE_TOKENS)
        elif isinstance(text := part.get("text"), str):
            total = _plus(total, _text_range(text))
    return total


def _text_range(text: str) -> tuple[float, float]:
    most, fewest = _CHARS_PER_TOKEN[1]
    if text.isascii():
        return len(text) / most, len(text) / fewest
    ascii_chars = len(text.encode("ascii", "ignore"))
    others = len(text) - ascii_chars
    # One width for all characters that are not ASCII keeps this at a few microseconds for any length of row.
    width = round((_utf8_bytes(text) - ascii_chars) / others)
    other_most, other_fewest = _CHARS_PER_TOKEN[width]
    return ascii_chars / most + others / other_most, ascii_chars / fewest + others / other_fewest


def _plus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] + b[0], a[1] + b[1]
