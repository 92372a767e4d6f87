"""Which kind of CallError an error answer is: by its codes, else by its words, else by its status."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from batchmill_core.errors import (
    AuthFailed,
    CallError,
    Filtered,
    InvalidRequest,
    OutOfCredit,
    Overloaded,
    RateLimited,
    TooLong,
    Unavailable,
    UnknownModel,
)

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

_UNAVAILABLE = frozenset({408, 409, 424, 425, 499})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WRONG_ADDRESS = REDIRECTS | {404, 405, 410}


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


def implied_status(codes: frozenset[str]) -> int:
    """The HTTP status that an error in a 2xx answer would have had."""
    if codes & _RATE_CODES:
        return 429
    client_side = _FILTER_CODES | _LENGTH_CODES | _MODEL_CODES | _AUTH_CODES | {"invalid_request_error"}
    return 400 if codes & client_side else 500
