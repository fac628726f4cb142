"""Makes untrusted text safe to show on the page of a report."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_MOST_MARKS = 3
"""Maximum number of combining marks on a character. More marks would cover the lines above and
below."""
_KEPT = "\n\t\u200c\u200d"  # some scripts and emoji need these joiners
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n){2,}")
_USERINFO = re.compile(r"(://)[^/\s@]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#]*)\?[^\s\"'<>]*")


def sanitize(text: str) -> str:
    """Remove control characters, direction overrides and piles of combining marks from ``text``.

    Surrogates and private or unassigned characters become U+FFFD.
    """
    shown: list[str] = []
    marks = 0
    for character in text.replace("\r\n", "\n"):
        kind = unicodedata.category(character)
        marks = marks + 1 if kind in ("Mn", "Me") else 0
        if marks > _MOST_MARKS:
            continue
        if kind in ("Cs", "Co", "Cn"):
            shown.append("\N{REPLACEMENT CHARACTER}")
        elif kind[0] != "C" or character in _KEPT:
            shown.append("\n" if kind in ("Zl", "Zp") else character)
    return "".join(shown)


def cut(text: str, limit: int) -> str:
    """Sanitize ``text`` and cut it to ``limit`` characters; an ellipsis marks the cut.

    Several blank lines become one.
    """
    cleaned = _BLANK_LINES.sub("\n\n", sanitize(text[: 4 * limit]))
    whole = len(text) <= 4 * limit and len(cleaned) <= limit
    return cleaned if whole else cleaned[:limit].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def without_secrets(value: Any) -> Any:
    """Remove user names, passwords and query strings (which may hold signatures) from URLs."""
    if isinstance(value, str):
        return _QUERY.sub("\\1?\N{HORIZONTAL ELLIPSIS}", _USERINFO.sub(r"\1", value))
    if isinstance(value, dict):
        return {without_secrets(key): without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return value
