"""Regular expressions for the values of ``format`` in JSON schemas.

They allow only dates of the calendar, second 60 only at leap seconds (RFC 3339, section 5.7), and
host names and labels up to the longest lengths (RFC 1123, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping

GRAMMAR_FORMATS = frozenset(("duration", "ipv4", "ipv6", "uuid", "uri"))
"""Formats for which llguidance's own expressions are correct."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = (
    rf"(?:{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_MINUTE})"
    r"|23:59:60(?:\.[0-9]+)?[Zz])"
)
_ALNUM, _INNER = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]"


def _label(most: int) -> str:
    """Return the pattern of a host name's label, without hyphens in places 3 and 4 (Punycode)."""
    longer = f"{_INNER}(?:{_ALNUM}{_INNER}|-{_ALNUM}){_INNER}{{0,{most - 5}}}{_ALNUM}"
    return f"{_ALNUM}(?:{_ALNUM}|{_INNER}{{1,2}}{_ALNUM}|{longer})?"


_MAILBOX = rf"{_ATOM}(?:\.?{_ATOM}){{0,31}}"
"""Pattern of a mailbox of at most 63 characters; 64 would be valid."""
_MAIL_HOST = rf"{_label(40)}(?:\.{_label(40)}){{0,5}}"
"""Pattern of a host of at most 245 characters; 253 would be valid, but take too much work."""

PATTERNS: Mapping[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
    "hostname": (rf"^{_label(63)}(?:\.{_label(63)})*$", "^.{1,253}$"),
    "email": (f"^{_MAILBOX}@{_MAIL_HOST}$",),
}
"""Patterns by format; a string must match all patterns of its format."""
