"""Regular expressions, matched in a time that grows with the text's length alone.

What matches is the same on every machine: nothing is given up for taking long. Polars has Rust's
regex crate, which never goes back in a text and limits how large a compiled pattern may be. It is
imported when it is needed only.
"""

from __future__ import annotations

import re

_SYNTAX = (
    "write it in the syntax of Rust's regex crate, which has no look-around and no back-references"
)
_REASON = re.compile(r"^(?:error|regex error): (?!regex parse error)(.*)$", re.MULTILINE)


def has_match(pattern: str, text: str) -> bool:
    """Whether a text has a match of a pattern in it.

    Raises:
        ValueError: the pattern is none; with what to do.
    """
    import polars as pl
    from polars.exceptions import PolarsError

    try:
        pattern.encode()
        return bool(pl.Series([text]).str.contains(pattern).item())
    except PolarsError as error:
        found = _REASON.search(str(error))
        reason = found[1].rstrip(".") if found else "it cannot be read"
        raise ValueError(f"{reason}; {_SYNTAX}") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None
