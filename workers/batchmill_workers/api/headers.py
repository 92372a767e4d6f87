"""What a provider's response headers say: how long to wait, and the id of the request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime

LONGEST_WAIT_S = 86_400.0
_BUCKETS = ("requests", "tokens", "input-tokens", "output-tokens")
_REQUEST_IDS = ("x-request-id", "request-id", "apim-request-id", "x-ms-request-id", "x-generation-id")
_UNIT_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_GO_DURATION = re.compile(r"(?:\d+(?:\.\d*)?(?:d|h|ms|m|s|us|µs|ns))+")
_GO_PART = re.compile(r"(\d+(?:\.\d*)?)(d|h|ms|m|s|us|µs|ns)")
_FIRST_EPOCH_S = 1e9  # a number of seconds this big is a date (2001), not a duration
_FIRST_EPOCH_MS = 1e12


def request_id_of(headers: Mapping[str, str]) -> str | None:
    """The provider's id of the request, for people who ask its support."""
    for name in _REQUEST_IDS:
        value = headers.get(name)
        if value:
            return value[:200]
    return None


def wait_of(headers: Mapping[str, str], *, now: float) -> float | None:
    """How long the provider asks to wait, in seconds; None where it does not say.

    ``headers`` has lower-case names or compares them without case. Dates are compared with the provider's own ``Date``,
    else with ``now`` (seconds since the epoch). Only a bucket that is exhausted is waited for.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    now = _date(headers.get("date")) or now
    asked = duration_s(headers.get("retry-after"), now=now)
    return asked if asked is not None else _reset_of_exhausted(headers, now=now)


def duration_s(text: str | None, *, now: float) -> float | None:
    """Seconds from now that ``text`` names: seconds, a Go duration (``6m0s``), an epoch (s or ms) or a date.

    Never negative and at most a day; None if it is none of these.
    """
    if text is None:
        return None
    text = text.strip()
    number = _number(text)
    if number is not None:
        return _bounded(_from_epoch(number, now=now))
    if _GO_DURATION.fullmatch(text):
        return _bounded(sum(float(n) * _UNIT_S[unit] for n, unit in _GO_PART.findall(text)))
    date = _date(text)
    return None if date is None else _bounded(date - now)


def _reset_of_exhausted(headers: Mapping[str, str], *, now: float) -> float | None:
    waits = [_bucket_wait(headers, f"x-ratelimit-remaining-{b}", f"x-ratelimit-reset-{b}", now=now) for b in _BUCKETS]
    waits += [
        _bucket_wait(headers, f"anthropic-ratelimit-{b}-remaining", f"anthropic-ratelimit-{b}-reset", now=now)
        for b in _BUCKETS
    ]
    waits.append(_bucket_wait(headers, "x-ratelimit-remaining", "x-ratelimit-reset", now=now))
    waits.append(_bucket_wait(headers, "ratelimit-remaining", "ratelimit-reset", now=now))
    return max((w for w in waits if w is not None), default=None)


def _bucket_wait(headers: Mapping[str, str], remaining: str, reset: str, *, now: float) -> float | None:
    wait = duration_s(headers.get(reset), now=now)
    left = _number(headers.get(remaining))
    return None if wait is None or (left is not None and left > 0) else wait


def _from_epoch(number: float, *, now: float) -> float:
    if number >= _FIRST_EPOCH_MS:
        return number / 1000 - now
    return number - now if number >= _FIRST_EPOCH_S else number


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _date(text: str | None) -> float | None:
    """Seconds since the epoch of an HTTP or ISO 8601 date. Source: RFC 9110, 5.6.7; RFC 3339."""
    if not text or len(text) > 64:
        return None
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return parse(text).timestamp()
        except (ValueError, TypeError, IndexError, OverflowError, OSError):
            continue
    return None


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, 0.0), LONGEST_WAIT_S)
