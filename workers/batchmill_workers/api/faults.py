"""A provider's error answer translated to the error tree: OpenAI, Azure, Gemini, OpenRouter, Anthropic, DeepSeek, vLLM,
Ollama and the HTML pages of what stands before them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from batchmill_core.errors import CallError, CallState

from .fault_kinds import REDIRECTS, Fault, implied_status, kind_of
from .headers import duration_s, request_id_of, wait_of
from .json_body import parse_lenient, start_of
from .reported import usage_of

_MESSAGE_CHARS = 500

_TRY_AGAIN = re.compile(
    r"(?:try again|retry) (?:in|after) ((?:\d+(?:\.\d+)?(?:ms|s|m|h))+|\d+(?:\.\d+)? seconds?)", re.I
)
_TITLE = re.compile(r"<(?:title|h1)[^>]*>([^<]{1,200})", re.I)

_FIRST_ERROR, _LAST_ERROR = 400, 599


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
    return next((n for n in named if _FIRST_ERROR <= n <= _LAST_ERROR), implied_status(codes))


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
    if status not in REDIRECTS:
        return None
    return f"the address redirects to {headers.get('location', 'nowhere')[:200]}; set the account's base_url to where it is"


def _page_title(body: bytes) -> str | None:
    text = start_of(body)
    title = _TITLE.search(text)
    return title.group(1) if title else text.strip()[:200] or None


def _text(values: Any, name: str) -> str | None:
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, str) and value else None
