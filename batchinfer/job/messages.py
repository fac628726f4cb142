"""How values and texts of unknown content are shown in messages: short, on one line, harmless."""

from __future__ import annotations

import json
from collections.abc import Iterable

MAX_LINE = 300
"""Most characters of one line of a message."""


def printable(text: str, limit: int = MAX_LINE) -> str:
    """``text`` on one line of at most ``limit`` characters, control characters escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return "".join(shown)


def shown(value: object) -> str:
    """A job-file value as it would be written there, cut to 60 characters."""
    return printable(json.dumps(value, ensure_ascii=False, default=str), 60)


def listed(names: Iterable[str]) -> str:
    """Names with commas, for "one of" sentences."""
    return ", ".join(printable(name, 60) for name in names)
