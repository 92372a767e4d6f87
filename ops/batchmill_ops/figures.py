"""How amounts, rates and times are written for people."""

from __future__ import annotations


def rate(per_s: float | None) -> str:
    """``1,932`` or, below ten, ``0.4``; unknown is a dash."""
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}" if per_s >= 9.95 or per_s == 0 else f"{per_s:.1f}"


def percent(part: int, whole: int) -> str:
    """Whole percent, rounded down, so that 100 % means all."""
    return f"{100 * part // whole if whole else 0}%"


def duration(seconds: float | None) -> str:
    """``12 s``, ``3 min 05 s``, ``2 h 07 min``, ``4 d 3 h``; unknown is a dash."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def one_line(text: str, most: int = 120) -> str:
    """The text on one line, cut to at most ``most`` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"
