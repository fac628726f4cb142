"""Formats values and untrusted text for messages: short, on one line, without control codes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path, PurePath

from batchinfer.near_names import nearest, unseen_difference

MAX_LINE = 300
"""Maximum number of characters in a line of a message."""
_MOST_NAMES = 2000
"""Maximum number of names in a folder to compare with a wrong name; there may be millions."""


def printable(text: str, limit: int = MAX_LINE) -> str:
    """Return ``text`` as one line of up to ``limit`` characters; escape control characters."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has a letter.

    If no line has a letter, return the error's class and the first line.
    """
    lines = str(error).splitlines()
    worded = (line for line in lines if any(map(str.isalpha, line)))
    name = type(error).__name__
    return printable(next(worded, ": ".join([name, *lines[:1]])))


def pool_blocks(count: int, block_size: int) -> str:
    """Return the size of a KV pool.

    Args:
        block_size: tokens per block; 0 if blocks hold recurrent state only.
    """
    return f"{count:,} blocks of " + (f"{block_size} tokens" if block_size else "recurrent state")


def format_value(value: object) -> str:
    """Format a value as in a job file, cut to 60 characters."""
    return printable(json.dumps(value, ensure_ascii=False, default=str), 60)


def listed(names: Iterable[str]) -> str:
    return ", ".join(printable(name, 60) for name in names)


def did_you_mean(name: str, known: Sequence[str], what: str = "known") -> str:
    """Return ``; did you mean NAME?`` with a similar name, or else ``what`` and all known names."""
    return near_name(name, known) or f"; {what}: {listed(known) or 'none'}"


def near_name(name: str, known: Sequence[str]) -> str:
    """Return ``; did you mean NAME?`` with a similar known name, or "" if none is similar."""
    near = nearest(name, known)
    return f"; did you mean {printable(near, 60)}{unseen_difference(name, near)}?" if near else ""


def near_path(path: str | PurePath) -> str:
    """Return ``; did you mean PATH?`` with a similar path in the same folder, or ""."""
    wanted = Path(path)
    try:
        names = sorted(entry.name for entry in islice(wanted.parent.iterdir(), _MOST_NAMES))
    except (OSError, ValueError):
        return ""
    if (near := nearest(wanted.name, names)) is None:
        return ""
    unseen = unseen_difference(wanted.name, near)
    return f"; did you mean {printable(str(wanted.with_name(near)))}{unseen}?"


def counted(count: int, word: str) -> str:
    """Format a count with its noun; ``word`` is the singular."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def counted_rows(count: int) -> str:
    return counted(count, "row")


def whole_percent(share: float) -> str:
    """Format a share in whole percent, rounded down, so that only 1.0 is shown as 100%."""
    return f"{math.floor(100 * share)}%"


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            is_whole = count >= 100 or unit == "bytes"
            return f"{count:.0f} {unit}" if is_whole else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def duration(seconds: float) -> str:
    if 0 < seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
