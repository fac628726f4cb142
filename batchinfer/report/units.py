"""Numbers and times in words, with their units."""

from __future__ import annotations

from datetime import datetime


def amount(count: float, unit: str) -> str:
    """A mean number of things with its unit."""
    return f"{count:,.0f} {unit}" if count >= 10 or count == round(count) else f"{count:.2g} {unit}"


def counted(count: int, unit: str) -> str:
    """A number of things, ``unit`` of which is their plural."""
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


def percent(share: float) -> str:
    """A share, to a tenth of a percent where it is small; never 0% or 100% of what is not."""
    if 0 < share < 0.0005:
        return "under 0.1%"
    if 0.9945 < share < 1:
        return "over 99%"
    return f"{share:.1%}" if abs(share) < 0.0995 else f"{share:.0%}"


def short(count: float) -> str:
    """A number in a few characters."""
    if count < 10:
        return f"{count:.2g}"
    for limit, unit in ((1e4, ""), (1e6, "k"), (1e9, "M"), (1e12, "G")):
        if count < limit:
            scaled = count / {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
            return f"{scaled:,.0f}{unit}" if not unit or scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{count:.2g}"


def money(sum_: float, currency: str) -> str:
    """A sum of money with its currency."""
    shown = f"{sum_:,.2f}" if sum_ >= 0.1 or not sum_ else f"{sum_:.2g}"
    return f"{shown} {currency}"


def moment(seconds: float) -> str:
    """A time in this machine's zone and with its offset, such as ``2026-11-22 21:10 UTC+01:00``; ""
    where there is none.

    Args:
        seconds: since 1970.
    """
    try:
        at = datetime.fromtimestamp(seconds).astimezone() if seconds else None
    except (ValueError, OverflowError, OSError):
        return ""  # a clock that was not set
    if at is None:
        return ""
    zone = f"{at:%z}"
    offset = "" if zone == "+0000" else f"{zone[:3]}:{zone[3:5]}"
    return f"{at:%Y-%m-%d %H:%M} UTC{offset}"
