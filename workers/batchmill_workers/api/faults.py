"""A provider's error answer translated to the error tree: OpenAI, Azure, Gemini, OpenRouter, Anthropic, DeepSeek, vLLM,
Ollama and the HTML pages of what stands before them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmill_core.errors import (
    AuthFailed,
    CallError,
    CallState,
    Filtered,
    InvalidRequest,
    OutOfCredit,
    Overloaded,
    RateLimited,
    TooLong,
    Unavailable,
    UnknownModel,
)

from .headers import duration_s, request_id_of, wait_of
from .json_body import parse_lenient, start_of
from .reported import usage_of

_MESSAGE_CHARS = 500
_REASON_CHARS = 300

# Codes and types win over messages; within a table the order does not matter, between tables it does.
_CREDIT_CODES = frozenset(
    {"insufficient_quota", "insufficient_credits", "insufficient_balance", "billing_hard_limit_reached"}
    | {"billing_not_active", "account_deactivated", "billing_error", "arrearage", "exceeded_current_quota_error"}
)
_FILTER_CODES = frozenset(
    {"content_filter", "content_policy_violation", "responsibleaipolicyviolation", "data_inspection_failed"}
    | {"datainspectionfailed", "moderation_blocked", "invalid_prompt", "prohibited_content"}
)
_LENGTH_CODES = frozenset(
    {"context_length_exceeded", "context_window_exceeded", "exceed_context_size_error", "string_above_max_length"}
    | {"request_too_large", "max_context_length_exceeded"}
)
_MODEL_CODES = frozenset({"model_not_found", "deploymentnotfound", "unknown_model", "model_not_exist", "invalid_model"})
_AUTH_CODES = frozenset(
    {"invalid_api_key", "authentication_error", "permission_error", "api_key_invalid", "unauthenticated"}
    | {"permission_denied", "incorrect_api_key", "unsupported_country_region_territory"}
)
_RATE_CODES = frozenset({"rate_limit_exceeded", "rate_limit_error", "rate_limited", "resource_exhausted", "429"})
_OVERLOAD_CODES = frozenset({"overloaded_error", "overloaded", "engine_overloaded", "server_overloaded", "unavailable"})

_CREDIT_WORDS = re.compile(
    r"insufficient (?:account )?(?:balance|credit|funds)|credit balance is too low|exceeded your current quota"
    r"|out of credits?|余额不足|欠费",
    re.I,
)
_FILTER_WORDS = re.compile(
    r"content management policy|content[ _]filter|content exists risk|flagged as potentially violating"
    r"|requires moderation|input was flagged|safety (?:system|policy)|敏感",
    re.I,
)
_LENGTH_WORDS = re.compile(
    r"maximum (?:context|prompt|input) length|context[ _](?:length|window|limit|size)|(?:prompt|input|request) is too long"
    r"|input token count .{0,80}exceeds|maximum number of (?:input )?tokens|reduce the length of|too many input tokens"
    r"|longer than the maximum",
    re.I,
)
_MODEL_WORDS = re.compile(
    r"model\b.{0,120}\b(?:does not exist|not exist|not found|is not available|not supported for)|model not exist"
    r"|unknown model|invalid model|not a valid model|no endpoints found|does not work with the specified model",
    re.I,
)
_AUTH_WORDS = re.compile(r"api[ _-]?key (?:not valid|is invalid|expired)|invalid api[ _-]?key", re.I)
_TOO_BIG_FOR_LIMIT = re.compile(r"\brequest too large\b", re.I)  # OpenAI: one request over the tokens per minute
_TRY_AGAIN = re.compile(
    r"(?:try again|retry) (?:in|after) ((?:\d+(?:\.\d+)?(?:ms|s|m|h))+|\d+(?:\.\d+)? seconds?)", re.I
)
_TITLE = re.compile(r"<(?:title|h1)[^>]*>([^<]{1,200})", re.I)

_UNAVAILABLE = frozenset({408, 409, 424, 425, 499})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WRONG_ADDRESS = _REDIRECTS | {404, 405, 410}
_FIRST_ERROR, _LAST_ERROR = 400, 599


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What an error answer says, whatever its dialect. ``codes`` are its codes, types and reasons in lower case."""

    status: int
    codes: frozenset[str]
    message: str
    asked_wait: str | None
    usage: Any
    is_json: bool

    @property
    def words(self) -> str:
        """The start of the message, where the reason stands; what follows may quote the row."""
        return self.message[:_REASON_CHARS]

    def has(self, known: frozenset[str]) -> bool:
        return not known.isdisjoint(self.codes)


def error_of(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    started: bool = False,
    latency_ms: int | None = None,
) -> CallError:
    """The CallError of an error answer.

    ``status`` is HTTP's; in a 2xx answer the error's own code decides. ``now`` is in seconds since the epoch.
    ``started`` says that the model had begun to answer: then the call may have been billed, whatever the error.
    """
    parsed = parse_lenient(body)
    fault = read_fault(status, parsed, body)
    kind = kind_of(fault)
    wait = wait_of(headers, now=now)
    if wait is None:
        wait = duration_s(fault.asked_wait, now=now)
    return kind(
        f"{_redirect(status, headers) or fault.message} (HTTP {status})",
        wait_s=wait if kind.retryable else None,
        usage=usage_of(fault.usage),
        raw=start_of(body),
        request_id=request_id_of(headers) or _text(parsed, "request_id"),
        http_status=status,
        latency_ms=latency_ms,
        ledger=CallState.UNKNOWN if started else None,
    )


def kind_of(fault: Fault) -> type[CallError]:
    """The kind of error: first what its codes say, then its words, then its status."""
    status, words = fault.status, fault.words
    if fault.has(_CREDIT_CODES) or status == 402:
        return OutOfCredit
    if status < 500 and _CREDIT_WORDS.search(words) and not _is_gemini_limit(fault):
        return OutOfCredit
    if status == 429 or fault.has(_RATE_CODES):
        return TooLong if _TOO_BIG_FOR_LIMIT.search(words) else RateLimited
    if status >= 500 or fault.has(_OVERLOAD_CODES) or status in _UNAVAILABLE:
        return _server_side(fault)
    return _client_side(fault)


def _server_side(fault: Fault) -> type[CallError]:
    if fault.has(_LENGTH_CODES) or (fault.is_json and _LENGTH_WORDS.search(fault.words)):
        return TooLong  # Ollama and llama.cpp answer 500
    return Overloaded if fault.status in (503, 529) or fault.has(_OVERLOAD_CODES) else Unavailable


def _client_side(fault: Fault) -> type[CallError]:
    words = fault.words
    if fault.has(_FILTER_CODES) or _FILTER_WORDS.search(words):
        return Filtered
    if fault.has(_LENGTH_CODES) or fault.status == 413 or _LENGTH_WORDS.search(words):
        return TooLong
    if fault.has(_MODEL_CODES) or fault.status in _WRONG_ADDRESS or _MODEL_WORDS.search(words):
        return UnknownModel
    if fault.status == 403 and not fault.is_json:
        return Overloaded  # a firewall's page: it may dislike this prompt or this minute, but it has not judged the key
    if fault.status in (401, 403, 407) or fault.has(_AUTH_CODES) or _AUTH_WORDS.search(words):
        return AuthFailed
    return InvalidRequest


def _is_gemini_limit(fault: Fault) -> bool:
    """Gemini words its rate limit as OpenAI words an empty account."""
    return "resource_exhausted" in fault.codes or fault.asked_wait is not None


def read_fault(status: int, parsed: Any, body: bytes) -> Fault:
    """Reads the error object of any dialect: nested, flat, a bare string, or in a list of one."""
    outer = parsed[0] if isinstance(parsed, list) and parsed else parsed
    outer = outer if isinstance(outer, dict) else {}
    error = outer.get("error", outer)
    inner = error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}
    message = _message(inner, outer) or _page_title(body) or f"the provider answered {status} without a reason"
    codes = _codes(inner) | _codes(outer if error is outer else {})
    return Fault(
        status=_effective_status(status, codes),
        codes=codes,
        message=" ".join(message[: 4 * _MESSAGE_CHARS].split())[:_MESSAGE_CHARS],
        asked_wait=_asked_wait(inner, message),
        usage=outer.get("usage"),
        is_json=parsed is not None,
    )


def _effective_status(status: int, codes: frozenset[str]) -> int:
    """HTTP's status if it is an error or a redirect, else the one that the error object names, else 500."""
    if status >= 300:
        return status
    named = [int(c) for c in codes if len(c) == 3 and c.isascii() and c.isdigit()]
    return next((n for n in named if _FIRST_ERROR <= n <= _LAST_ERROR), _implied_status(codes))


def _implied_status(codes: frozenset[str]) -> int:
    if codes & _RATE_CODES:
        return 429
    client_side = _FILTER_CODES | _LENGTH_CODES | _MODEL_CODES | _AUTH_CODES | {"invalid_request_error"}
    return 400 if codes & client_side else 500


def _codes(error: dict[str, Any]) -> frozenset[str]:
    found = [error.get(name) for name in ("code", "type", "status", "statusCode", "reason")]
    innermost = error.get("innererror")
    if isinstance(innermost, dict):
        found.append(innermost.get("code"))
    found += [detail.get("reason") for detail in _details(error)]
    return frozenset(str(c).lower() for c in found if isinstance(c, int | str) and not isinstance(c, bool))


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    details = error.get("details")
    return [d for d in details if isinstance(d, dict)] if isinstance(details, list) else []


def _message(inner: dict[str, Any], outer: dict[str, Any]) -> str | None:
    metadata = inner.get("metadata")
    upstream = metadata.get("raw") if isinstance(metadata, dict) else None  # OpenRouter passes on what it was told
    own = _text(inner, "message") or _text(outer, "message") or _text(inner, "detail") or _text(inner, "error_msg")
    return f"{own}: {upstream}" if own and isinstance(upstream, str) and upstream else own


def _asked_wait(error: dict[str, Any], message: str) -> str | None:
    """How long the body says to wait: Gemini's RetryInfo, or OpenAI's and Azure's words."""
    for detail in _details(error):
        delay = detail.get("retryDelay")
        if isinstance(delay, str):
            return delay
    said = _TRY_AGAIN.search(message)
    return None if said is None else said.group(1).split()[0]


def _redirect(status: int, headers: Mapping[str, str]) -> str | None:
    """Redirects are refused: following one would send the key and the prompt to an address nobody configured."""
    if status not in _REDIRECTS:
        return None
    return f"the address redirects to {headers.get('location', 'nowhere')[:200]}; set the account's base_url to where it is"


def _page_title(body: bytes) -> str | None:
    text = start_of(body)
    title = _TITLE.search(text)
    return title.group(1) if title else text.strip()[:200] or None


def _text(values: Any, name: str) -> str | None:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, str) and value else None
