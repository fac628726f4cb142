r"""Regular expressions: matched in linear time, and spelt so that all dialects agree.

What matches is the same on every machine: nothing is given up for taking long. Arrow has RE2, which
never goes back in a text, limits how large a compiled pattern may be, and needs no threads. It is
imported when it is needed only.

What texts are made by has ``\d``, ``\s`` and ``\w`` as ASCII. llguidance takes any Unicode digit
for ``\d``. ECMAScript, whose expressions JSON Schema has, and RE2 take ASCII's. Of blanks they take
different ones: a text made for ``\s`` has one that both take, and one made for ``\S`` none that
either takes, so that it passes whoever checks it.
"""

from __future__ import annotations

_SYNTAX = "write it in the syntax of RE2, which has no look-around and no back-references"

_BLANKS = r"\t\n\f\r "
"""RE2's ``\\s``."""
_ANY_BLANKS = rf"{_BLANKS}\v\u{{A0}}\u{{1680}}\u{{2000}}-\u{{200A}}\u{{2028}}\u{{2029}}" + (
    r"\u{202F}\u{205F}\u{3000}\u{FEFF}"
)
"""ECMAScript's, https://tc39.es/ecma262/#prod-WhiteSpace and LineTerminator."""
_NAMED = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_MADE = _NAMED | {"s": f"[{_BLANKS}]", "S": f"[^{_ANY_BLANKS}]"}
_KEPT_OUT = _NAMED | {"s": f"[{_ANY_BLANKS}]", "S": f"[^{_BLANKS}]"}
"""Within ``[^...]``."""


def has_match(pattern: str, text: str) -> bool:
    """Whether a text has a match of a pattern in it.

    Raises:
        ValueError: the pattern is none; with what to do.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pattern.encode()
        return bool(pc.match_substring_regex(pa.scalar(text), pattern).as_py())
    except pa.ArrowInvalid as error:
        reason = str(error).removeprefix("Invalid regular expression: ")
        raise ValueError(f"{reason}; {_SYNTAX}") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None


def with_ascii_classes(pattern: str) -> str:
    """A pattern in the syntax of Rust's ``regex`` whose classes are spelt out."""
    out: list[str] = []
    inside: list[bool] = []
    """Of each bracket that is open, whether what stands in it is made, not kept out."""
    at = 0
    while at < len(pattern):
        taken = pattern[at]
        if taken == "\\":
            taken = pattern[at : at + 2]
            classes = _MADE if not inside or inside[-1] else _KEPT_OUT
            out.append(classes.get(taken[1:], taken))
        elif taken == "[":
            negated = pattern.startswith("^", at + 1)
            taken = "[^" if negated else "["
            inside.append((not inside or inside[-1]) != negated)
            if pattern.startswith("]", at + len(taken)):  # the first one is a character
                taken += "]"
            out.append(taken)
        else:
            if taken == "]" and inside:
                inside.pop()
            out.append(taken)
        at += len(taken)
    return "".join(out)
