"""Usage as providers report it, in all their dialects, turned into one Usage that never contradicts itself."""

from __future__ import annotations

from typing import Any

from batchmill_core.usage import Usage

_MOST_TOKENS = 2**40  # more than any call has; guards the integer columns and the bill against nonsense


def usage_of(reported: Any, *, has_output: bool = True) -> Usage | None:
    """The tokens of one call, or None where the provider did not say: unknown is not zero.

    ``reported`` is the ``usage`` object of OpenAI, DeepSeek, OpenRouter, Gemini or xAI (``prompt_tokens``), or of
    Anthropic and the Responses API (``input_tokens``). Parts are cut to what contains them, so that no cost is negative.
    ``has_output`` is False for embeddings, whose output is zero.
    """
    if not isinstance(reported, dict):
        return None
    tokens_in = _first(reported, "prompt_tokens", "input_tokens")
    tokens_out = _first(reported, "completion_tokens", "output_tokens")
    total = _count(reported.get("total_tokens"))
    if not has_output:
        tokens_in, tokens_out = (total if tokens_in is None else tokens_in), 0
    elif total is not None:
        tokens_in, tokens_out = _completed(tokens_in, tokens_out, total)
    if tokens_in is None or tokens_out is None or tokens_in + tokens_out == 0:
        return None
    return _with_parts(reported, tokens_in, tokens_out, total if has_output else None)


def _with_parts(reported: dict[str, Any], tokens_in: int, tokens_out: int, total: int | None) -> Usage:
    cached, written = _cache_parts(reported)
    reasoning = _detail(reported, ("completion_tokens_details", "output_tokens_details"), "reasoning_tokens")
    if "prompt_tokens" not in reported and ("cache_read_input_tokens" in reported or written):
        tokens_in += cached + written  # Anthropic's input_tokens leaves them out
    elif total is not None and total > tokens_in + tokens_out:
        # Gemini and xAI bill thinking as output and leave it out of completion_tokens
        hidden = total - tokens_in - tokens_out
        tokens_out, reasoning = tokens_out + hidden, max(reasoning, hidden)
    cached = min(cached, tokens_in)
    return Usage(
        input=tokens_in,
        cached_input=cached,
        cache_write=min(written, tokens_in - cached),
        output=tokens_out,
        reasoning=min(reasoning, tokens_out),
    )


def _cache_parts(reported: dict[str, Any]) -> tuple[int, int]:
    """Tokens read from and written to the provider's prompt cache."""
    inside = ("prompt_tokens_details", "input_tokens_details")
    cached = _first(reported, "prompt_cache_hit_tokens", "cache_read_input_tokens", "cached_tokens")
    written = _count(reported.get("cache_creation_input_tokens"))
    return (
        cached or _detail(reported, inside, "cached_tokens"),
        written or _detail(reported, inside, "cache_write_tokens", "cache_creation_tokens"),
    )


def _completed(tokens_in: int | None, tokens_out: int | None, total: int) -> tuple[int | None, int | None]:
    """Fills in the one count that is missing, where the other and the total are known."""
    if tokens_in is None and tokens_out is not None and total >= tokens_out:
        return total - tokens_out, tokens_out
    if tokens_out is None and tokens_in is not None and total >= tokens_in:
        return tokens_in, total - tokens_in
    return tokens_in, tokens_out


def _detail(reported: dict[str, Any], groups: tuple[str, ...], *names: str) -> int:
    for group in groups:
        inner = reported.get(group)
        if isinstance(inner, dict):
            count = _first(inner, *names)
            if count is not None:
                return count
    return 0


def _first(values: dict[str, Any], *names: str) -> int | None:
    for name in names:
        count = _count(values.get(name))
        if count is not None:
            return count
    return None


def _count(value: Any) -> int | None:
    """A number of tokens, or None for what is none: null, booleans, text, negative or absurd numbers."""
    if type(value) is int:
        return value if 0 <= value <= _MOST_TOKENS else None
    if isinstance(value, float) and value.is_integer():
        return _count(int(value))
    if isinstance(value, str) and len(value) <= 13 and value.isascii() and value.isdigit():
        return _count(int(value))
    return None
