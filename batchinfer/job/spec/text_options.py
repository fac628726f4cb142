"""Checks the keys of ``input`` that say how to read text files."""

from __future__ import annotations

import codecs
import io
from encodings.aliases import aliases

from batchinfer.console.format import format_value, near_name, printable


def encoding_name(name: str) -> str:
    """Return Python's name for a text encoding. Raise ValueError for an unknown encoding."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=name)
    except (LookupError, ValueError):
        known = sorted(codec for codec in aliases.values() if not codec.endswith("_codec"))
        raise ValueError(
            f"{printable(name, 60)} is not Python's name of a text encoding"
            f"{near_name(name, known) or ', like cp1252'}"
        ) from None
    return codecs.lookup(name).name


def delimiter_character(text: str) -> str:
    """Return ``text`` if it can separate cells; raise ValueError if it cannot."""
    if len(text) != 1 or not text.isascii() or text in '"\r\n\0':
        raise ValueError(
            f"{format_value(text)} cannot separate cells; use one ASCII character, like ;"
        )
    return text
