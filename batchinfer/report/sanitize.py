"""Texts of unknown content, made fit for a page: they can say anything, and do nothing."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

_MOST_MARKS = 3  # on one character: more would be drawn over the lines above and below
_KEPT = "\n\t\u200c\u200d"  # joiners are part of how some scripts and signs are written
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n){2,}")
_USERINFO = re.compile(r"(://)[^/\s@]*@")
_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#]*)\?[^\s\"'<>]*")


def sanitize(text: str) -> str:
    """``text`` without control characters, without what turns the direction of other text, and
    without piles of combining marks; characters that have no meaning become U+FFFD."""
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
    """At most ``limit`` characters of a cleaned ``text``, on no more lines than it has paragraphs
    and breaks; an ellipsis says that there is more."""
    cleaned = _BLANK_LINES.sub("\n\n", sanitize(text[: 4 * limit]))
    whole = len(text) <= 4 * limit and len(cleaned) <= limit
    return cleaned if whole else cleaned[:limit].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def without_secrets(value: Any) -> Any:
    """JSON data without what URLs may carry beside a place: users, passwords, signed queries."""
    if isinstance(value, str):
        return _QUERY.sub("\\1?\N{HORIZONTAL ELLIPSIS}", _USERINFO.sub(r"\1", value))
    if isinstance(value, dict):
        return {without_secrets(key): without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return value
