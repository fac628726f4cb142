"""Formats numbers and times with their units."""

from __future__ import annotations

from datetime import datetime


def amount(count: float, unit: str) -> str:
    """Format an average count; ``unit`` is a plural noun."""
    return f"{count:,.0f} {unit}" if count >= 10 or count == round(count) else f"{count:.2g} {unit}"


def percent(share: float) -> str:
    """Format a share in percent, with one decimal below 10%.

    Only 0 is shown as 0%, and only 1 as 100%.
    """
    if 0 < share < 0.0005:
        return "under 0.1%"
    if 0.9945 < share < 1:
        return "over 99%"
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def short(count: float) -> str:
    if count < 10:
        return f"{count:.2g}"
    for scale, suffix in ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        scaled = count / scale
        if scaled < (1e4 if scale == 1 else 1e3):
            return (
                f"{scaled:,.0f}{suffix}" if not suffix or scaled >= 100 else f"{scaled:.1f}{suffix}"
            )
    return f"{count:.2g}"


def money(amount: float, currency: str) -> str:
    return (
        f"{amount:,.2f} {currency}" if amount >= 0.1 or not amount else f"{amount:.2g} {currency}"
    )


def moment(seconds: float) -> str:
    """Format a time in seconds since 1970, such as ``2026-11-22 21:10 UTC+01:00``, in local time.

    Return "" for 0 and for invalid times, which occur if the clock was not set.
    """
    try:
        at = datetime.fromtimestamp(seconds).astimezone() if seconds else None
    except (ValueError, OverflowError, OSError):
        at = None
    if at is None:
        return ""
    zone = f"{at:%z}"
    offset = "" if zone == "+0000" else f"{zone[:3]}:{zone[3:5]}"
    return f"{at:%Y-%m-%d %H:%M} UTC{offset}"
