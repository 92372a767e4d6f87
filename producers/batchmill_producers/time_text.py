"""Dates and times as ISO 8601, from the integers that tables hold; to the nanosecond."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, timezone
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from .sanitize import BadValue, duration_text

PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
BEYOND = BadValue("a date or time beyond the years 1 to 9999")
_EPOCH = datetime(1970, 1, 1)


def date_text(days: int) -> Any:
    """The date so many days after 1970-01-01, or BEYOND."""
    return _day(days) or BEYOND


@lru_cache(maxsize=4096)
def _day(days: int) -> str | None:
    try:
        return (_EPOCH + timedelta(days=days)).date().isoformat()
    except OverflowError:
        return None


def timestamp_text(value: int, *, per_second: int, zone: Any) -> Any:
    """As ``datetime.isoformat`` writes it, with nine digits where nanoseconds are there, and the zone's offset."""
    seconds, fraction = divmod(value, per_second)
    try:
        moment = _EPOCH + timedelta(seconds=seconds)
        if zone is not None:
            moment = moment.replace(tzinfo=UTC).astimezone(zone)
    except (OverflowError, ValueError):
        return BEYOND
    text = moment.isoformat()
    return text[:19] + _fraction(fraction, per_second) + text[19:]


def time_text(value: int, *, per_second: int) -> str:
    """The time of day so many units after midnight. Raises ValueError for a day's length or more."""
    seconds, fraction = divmod(value, per_second)
    clock = time(seconds // 3600, seconds // 60 % 60, seconds % 60)
    return clock.isoformat() + _fraction(fraction, per_second)


def _fraction(fraction: int, per_second: int) -> str:
    nanoseconds = fraction * (PER_SECOND["ns"] // per_second)
    if not nanoseconds:
        return ""
    return f".{nanoseconds:09d}" if nanoseconds % 1000 else f".{nanoseconds // 1000:06d}"


def interval_text(value: Any) -> str:
    """Arrow's interval of months, days and nanoseconds as an ISO 8601 duration."""
    seconds = duration_text(abs(value.nanoseconds))[2:]
    return f"P{value.months}M{value.days}DT{'-' if value.nanoseconds < 0 else ''}{seconds}"


def zone_of(name: str | None) -> Any:
    """A zone by its IANA name, or an offset such as ``+01:00``. Raises LookupError."""
    if name is None or name.upper() in ("UTC", "Z"):
        return None if name is None else UTC
    if name[0] in "+-":
        hours, minutes = int(name[1:3]), int(name[-2:])
        offset = timedelta(hours=hours, minutes=minutes)
        return timezone(-offset if name[0] == "-" else offset)
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError) as error:
        raise LookupError(f"time zone {name!r} is not known here; pip install tzdata, or write it in UTC") from error
