"""Suggests the known name nearest to a misspelled name, for messages.

Two names can look the same and differ: an accented letter can be one character (NFC) or two (NFD),
and a name can contain invisible characters: https://www.unicode.org/reports/tr15/.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal

_MOST_DIFFERENCES = 3  # shown in a message
_FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that looks like ``name``, or else the most similar name, or None."""
    candidates, look = [candidate for candidate in known if candidate != name], _as_seen(name)
    alike = (candidate for candidate in candidates if look and _as_seen(candidate) == look)
    return next(alike, None) or next(iter(difflib.get_close_matches(name, candidates, n=1)), None)


def unseen_difference(name: str, near: str) -> str:
    """Return a note in parentheses on how two names that look the same differ; "" otherwise."""
    if name == near or _as_seen(name) != _as_seen(near):
        return ""
    forms = [_form(text) for text in (near, name)]
    is_normal = forms[0] and forms[1] and forms[0] != forms[1]
    differences = [f"{forms[0]}, not {forms[1]}"] if is_normal else []
    differences += list(_differences(name, near))[:_MOST_DIFFERENCES]
    return f" (it looks the same: {'; '.join(differences)})"


def meant(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the nearest known name; "" if none is near."""
    near = nearest(name, known)
    return f"did you mean {near}{unseen_difference(name, near)}?" if near else ""


def _as_seen(name: str) -> str:
    """Return a form that is equal for names that look the same: composed (NFC), stripped, with
    plain spaces, and without invisible characters."""
    seen = (" " if unicodedata.category(c) == "Zs" else c for c in name if not _is_invisible(c))
    return unicodedata.normalize("NFC", "".join(seen)).strip()


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


def _form(name: str) -> str | None:
    """Return the name's Unicode form, NFC or NFD; None if both or neither apply."""
    forms = [form for form in _FORMS if unicodedata.is_normalized(form, name)]
    return forms[0] if len(forms) == 1 else None


def _differences(name: str, near: str) -> Iterator[str]:
    codes = difflib.SequenceMatcher(None, name, near, autojunk=False).get_opcodes()
    for kind, begin, end, near_begin, near_end in codes:
        less, more = name[begin:end], near[near_begin:near_end]
        if kind == "replace":
            yield f"{_points(more)}, not {_points(less)}"
        elif kind == "insert":
            yield f"with {_named(more)}"
        elif kind == "delete":
            yield f"without {_named(less)}"


def _points(text: str) -> str:
    return " ".join(f"U+{ord(character):04X}" for character in text)


def _named(text: str) -> str:
    """Return the code points; for a single character, also its Unicode name."""
    name = unicodedata.name(text, "") if len(text) == 1 else ""
    return f"{_points(text)} {name}".strip()
