"""Values and texts in messages: short, on one line, harmless."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path, PurePath

from batchinfer.near_names import nearest, unseen_difference

MAX_LINE = 300
"""Most characters of one line of a message."""
_MOST_NAMES = 2000
"""Of a folder, that are looked at for a near one: it may hold millions."""


def printable(text: str, limit: int = MAX_LINE) -> str:
    """``text`` on one line of at most ``limit`` characters, control characters escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return "".join(shown)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where it has none."""
    return printable((str(error).splitlines() or [type(error).__name__])[0])


def format_value(value: object) -> str:
    """A job-file value as it would be written there, cut to 60 characters."""
    return printable(json.dumps(value, ensure_ascii=False, default=str), 60)


def listed(names: Iterable[str]) -> str:
    """Names with commas, for "one of" sentences."""
    return ", ".join(printable(name, 60) for name in names)


def did_you_mean(name: str, known: Sequence[str], what: str = "known") -> str:
    """The end of a sentence about an unknown name: the nearest known one, else all of them.

    Args:
        what: says what all of them are.
    """
    return near_name(name, known) or f"; {what}: {listed(known) or 'none'}"


def near_name(name: str, known: Sequence[str]) -> str:
    """``did_you_mean`` where all names are shown elsewhere: nothing where none is near."""
    near = nearest(name, known)
    return f"; did you mean {printable(near, 60)}{unseen_difference(name, near)}?" if near else ""


def near_path(path: str | PurePath) -> str:
    """``near_name`` of a path that is not there, among what its folder holds."""
    wanted = Path(path)
    try:
        names = sorted(entry.name for entry in islice(wanted.parent.iterdir(), _MOST_NAMES))
    except (OSError, ValueError):
        return ""
    near = nearest(wanted.name, names)
    if near is None:
        return ""
    unseen = unseen_difference(wanted.name, near)
    return f"; did you mean {printable(str(wanted.with_name(near)))}{unseen}?"


def counted(count: int, word: str) -> str:
    """A number of things, with the word for one of them."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def counted_rows(count: int) -> str:
    """A number of rows, with the word."""
    return counted(count, "row")


def whole_percent(share: float) -> str:
    """A share that grows to 1, in whole percent: all is 100%, and nothing less is."""
    return f"{math.floor(100 * share)}%"


def size(count: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return (
                f"{count:.0f} {unit}" if count >= 100 or unit == "bytes" else f"{count:.3g} {unit}"
            )
        count /= 1024
    return f"{count:,.3g} TiB"


def duration(seconds: float) -> str:
    """A duration with the unit that fits it."""
    if 0 < seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    if 0 < seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
