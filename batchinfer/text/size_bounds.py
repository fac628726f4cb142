"""Upper bounds on what a template's string operations build, taken before they run.

A sandbox keeps a template away from Python's internals, not from ``"x" * 10**10``. Each function
here answers: how large would the result be? The sandbox refuses what is too large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_TEXT_CHARS = 16 * 2**20
"""Longest text, in characters, that a template may build or a row may bring."""
MAX_ITEMS = 1_000_000
"""Longest list that an operator may build."""
MAX_INT_BITS = 1 << 14

_TOO_LARGE = MAX_TEXT_CHARS + 1
_NUMBER = re.compile(r"\d+")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")


def text_size(value: object) -> int:
    """About ``len(str(value))``; stops counting once it is over ``MAX_TEXT_CHARS``."""
    if isinstance(value, str | bytes):
        return len(value)
    size = 0
    pending: list[object] = [value]
    while pending and size <= MAX_TEXT_CHARS:
        item = pending.pop()
        if isinstance(item, str | bytes):
            size += len(item) + 2
        elif isinstance(item, Mapping):
            size += 4 * len(item)
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, Collection) and not isinstance(item, range):
            size += 2 * len(item)
            pending.extend(item)
        else:
            size += 24
    return size


def check_binary(operator: str, left: Any, right: Any) -> bool:
    """Whether ``left operator right`` stays small; operators ``+ * ** %`` can make it grow."""
    if operator == "%" and isinstance(left, str | bytes):
        return formatted_size(left, right) <= MAX_TEXT_CHARS
    if isinstance(left, int) and isinstance(right, int):
        return _int_bits(operator, left, right) <= MAX_INT_BITS
    if operator == "+":
        return _joined(left, right)
    if operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, str | bytes | list | tuple) and isinstance(times, int):
                limit = MAX_TEXT_CHARS if isinstance(items, str | bytes) else MAX_ITEMS
                return len(items) * times <= limit
    return True


def _joined(left: Any, right: Any) -> bool:
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        return len(left) + len(right) <= MAX_TEXT_CHARS
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) + len(right) <= MAX_ITEMS
    return True


def _int_bits(operator: str, left: int, right: int) -> int:
    if operator == "**":
        return left.bit_length() * max(right, 1)
    return left.bit_length() + right.bit_length() if operator == "*" else 0


def formatted_size(pattern: str | bytes, *args: object, **kwargs: object) -> int:
    """Size of ``pattern % args`` or ``pattern.format(*args, **kwargs)``: every field could hold
    all the arguments, padded to the largest number in sight."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    fields = text.count("%") + text.count("{")
    widths = [int(number) if len(number) < 9 else _TOO_LARGE for number in _NUMBER.findall(text)]
    if "*" in text or _NESTED_FIELD.search(text):  # a width that is an argument
        widths += [value for value in _flat(args, kwargs) if isinstance(value, int)]
    return len(text) + fields * (text_size([*args, kwargs]) + max(widths, default=0))


def _flat(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[object]:
    flat = list(kwargs.values())
    for value in args:
        flat += value if isinstance(value, list | tuple) else [value]
    return flat


def _padded(text: object, width: int = 80, *_: object, **__: object) -> int:
    return max(text_size(text), width)


def _replaced(text: Any, old: Any, new: Any, *_: object, **__: object) -> int:
    if isinstance(text, bytes):
        return len(text) + int(text.count(old)) * len(new)
    if text_size([text, new]) > MAX_TEXT_CHARS:
        return _TOO_LARGE
    body = str(text)  # the filter of this name takes anything, and makes text of it
    return len(body) + body.count(str(old)) * len(str(new))


def _separated(items: list[Any], d: Any = "", *_: object, **__: object) -> int:
    return text_size(items) + len(items) * text_size(d)


def _joined_by(separator: str | bytes, items: list[Any]) -> int:
    return _separated(items, separator)


def _expanded(text: str | bytes, tabsize: int = 8) -> int:
    tabs = text.count("\t") if isinstance(text, str) else text.count(b"\t")
    return len(text) + tabs * tabsize


def _indented(text: str, width: int | str = 4, *_: object, **__: object) -> int:
    per_line = width if isinstance(width, int) else len(width)
    return len(text) + (text.count("\n") + 1) * per_line


def _wrapped(text: str, width: int = 79, *args: Any, **kwargs: Any) -> int:
    between = kwargs.get("wrapstring") or (args[1] if len(args) > 1 else None) or "\n"
    return len(text) * (1 + len(between))


def _truncated(text: str, *args: object, **kwargs: object) -> int:
    return len(text) + text_size([*args, kwargs])


def _stringified(value: object, *_: object, **__: object) -> int:
    return text_size(value)


def _rounded(value: object, precision: int = 0, *_: object, **__: object) -> int:
    return 0 if abs(precision) <= 100 else _TOO_LARGE


def _grouped(items: object, *args: object, **kwargs: object) -> int:
    counts = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
    return 0 if max(counts, default=0) <= MAX_ITEMS else _TOO_LARGE


def _summed(items: object, attribute: object = None, start: object = 0) -> int:
    return 0 if isinstance(start, int | float) else _TOO_LARGE


METHODS: Mapping[str, Callable[..., int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _expanded,
    "replace": _replaced,
    "join": _joined_by,
    "format": formatted_size,
    "format_map": formatted_size,
}
"""Methods of str and bytes whose result may be much larger than the text: (text, *args)."""

FILTERS: Mapping[str, Callable[..., int]] = {
    "center": _padded,
    "replace": _replaced,
    "join": _separated,
    "format": formatted_size,
    "indent": _indented,
    "wordwrap": _wrapped,
    "truncate": _truncated,
    "tojson": _stringified,
    "round": _rounded,
    "batch": _grouped,
    "slice": _grouped,
    "sum": _summed,
    "string": _stringified,
    "pprint": _stringified,
    "urlencode": _stringified,
    "upper": _stringified,
    "lower": _stringified,
    "title": _stringified,
    "capitalize": _stringified,
    "trim": _stringified,
    "escape": _stringified,
    "e": _stringified,
    "forceescape": _stringified,
    "safe": _stringified,
    "striptags": _stringified,
    "wordcount": _stringified,
}
"""Filters that turn values into text, or build lists: (value, *args)."""

UNSAFE_METHODS = frozenset({"translate", "maketrans", "to_bytes", "from_bytes"})
"""Methods whose result has no simple bound, and which no prompt needs."""
UNSAFE_FILTERS = ("urlize", "xmlattr", "random")
"""HTML makers without a simple bound, and chance, which would change a prompt when rerun."""
