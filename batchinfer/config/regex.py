r"""Matches regular expressions in linear time, and makes patterns portable between dialects.

Matching uses Arrow's RE2, which is imported on first use. RE2 never backtracks and limits the size
of compiled patterns. Matching therefore needs no time limit, and gives the same result on every
machine.

Patterns for generated text spell out ``\d``, ``\s`` and ``\w`` in ASCII, because dialects differ:
llguidance lets ``\d`` match any Unicode digit, while ECMAScript (for JSON Schema) and RE2 match
ASCII digits but different whitespace. A text generated for ``\s`` uses only whitespace that both
dialects match, and a text for ``\S`` avoids whitespace that either dialect matches, so every
checker accepts the text.
"""

from __future__ import annotations

_SYNTAX = "write it in RE2 syntax, which has no look-around and no back-references"

_BLANKS = r"\t\n\f\r "
"""Characters of ``\\s`` in RE2."""
_ANY_BLANKS = rf"{_BLANKS}\v\u{{A0}}\u{{1680}}\u{{2000}}-\u{{200A}}\u{{2028}}\u{{2029}}" + (
    r"\u{202F}\u{205F}\u{3000}\u{FEFF}"
)
"""Characters of ``\\s`` in ECMAScript: tc39.es/ecma262/#prod-WhiteSpace and LineTerminator."""
_NAMED = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_POSITIVE = _NAMED | {"s": f"[{_BLANKS}]", "S": f"[^{_ANY_BLANKS}]"}
_NEGATED = _NAMED | {"s": f"[{_ANY_BLANKS}]", "S": f"[^{_BLANKS}]"}
"""Classes within ``[^...]``."""


def has_match(pattern: str, text: str) -> bool:
    """Return True if a text contains a match; raise ValueError if the pattern is not valid RE2."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pattern.encode()
        return bool(pc.match_substring_regex(pa.scalar(text), pattern).as_py())
    except pa.ArrowInvalid as error:
        reason = str(error).removeprefix("Invalid regular expression: ")
        raise ValueError(f"{reason}; {_SYNTAX}") from None
    except UnicodeEncodeError:
        raise ValueError("it contains half of a surrogate pair") from None


def with_ascii_classes(pattern: str) -> str:
    """Return a pattern in the syntax of Rust's ``regex``, with ASCII classes spelled out."""
    out: list[str] = []
    positive: list[bool] = []
    """For each open bracket: True if its characters are generated, False if excluded."""
    at = 0
    while at < len(pattern):
        taken = pattern[at]
        if taken == "\\":
            taken = pattern[at : at + 2]
            classes = _POSITIVE if not positive or positive[-1] else _NEGATED
            out.append(classes.get(taken[1:], taken))
        elif taken == "[":
            negated = pattern.startswith("^", at + 1)
            taken = "[^" if negated else "["
            positive.append((not positive or positive[-1]) != negated)
            # A "]" at the start is an ordinary character.
            if pattern.startswith("]", at + len(taken)):
                taken += "]"
            out.append(taken)
        else:
            if taken == "]" and positive:
                positive.pop()
            out.append(taken)
        at += len(taken)
    return "".join(out)
