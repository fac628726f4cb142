"""Regular expressions, matched in a time that grows with the text's length alone.

What matches is the same on every machine: nothing is given up for taking long. Arrow has RE2, which
never goes back in a text, limits how large a compiled pattern may be, and needs no threads. It is
imported when it is needed only.
"""

from __future__ import annotations

_SYNTAX = "write it in the syntax of RE2, which has no look-around and no back-references"


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
