"""What to do about text that is no YAML, by the parser's words for it."""

from __future__ import annotations

import re

_QUOTES = 'needs quotes around it, as in "{{ column }}"'
_REMEDIES = tuple(
    (re.compile(problem), remedy)
    for problem, remedy in (
        (
            r"(found|got) '<scalar>'",
            "within quotes write those of the other kind, as in \"{{ row['a name'] }}\"",
        ),
        (r"got '\{'", f"a text with braces {_QUOTES}"),
        (r"found character '\\t'", "indent with blanks"),
        (r"found character '(.)'", rf"a text that starts with \1 {_QUOTES}"),
        (
            "mapping values are not allowed",
            "a text with a colon needs quotes around it, and keys of one section the same indent",
        ),
        ("found '(<block mapping start>|-)'", "keys of one section need the same indent"),
        ("unexpected end of stream", "a quote is not closed"),
        (r"got ':'", "a brace or bracket before it is not closed"),
    )
)
PLAIN_KEY = f"a key must be a plain text, and a text that starts with a brace or bracket {_QUOTES}"
"""Of ``template: {{ column }}``, which YAML takes for a mapping whose key is a mapping."""


def with_remedy(problem: str) -> str:
    """The parser's ``problem``, and what is most likely to be done about it, if that is known."""
    for pattern, remedy in _REMEDIES:
        if match := pattern.search(problem):
            return f"{problem}; {match.expand(remedy)}"
    return problem
