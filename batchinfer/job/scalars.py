"""What a plain scalar means: the core schema of YAML 1.2.2 (section 10.3.2).

``1e-5`` is a number, ``no`` is a text.
"""

from __future__ import annotations

import math
import re

from batchinfer.job.messages import printable

Scalar = str | int | float | bool | None

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER_LIMIT = 2**64


def plain_scalar(text: str) -> Scalar:
    """The value that ``text``, written without quotes, stands for.

    Raises:
        ValueError: saying what is wrong with it: a number out of range, or not valid Unicode.
    """
    if _NULL.fullmatch(text):
        return None
    if match := _BOOL.fullmatch(text):
        return match.group(1) is not None
    if _INT.fullmatch(text):
        return _integer(text)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a number that can be used here")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            raise ValueError(f"{printable(text, 40)} is too large a number")
        return number
    return valid_text(text)


def valid_text(text: str) -> str:
    """``text`` itself.

    Raises:
        ValueError: it is not valid Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{printable(text, 40)} is not valid Unicode") from None
    return text


def _integer(text: str) -> int:
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    digits = text if base == 10 else text[2:]
    # The length check also keeps int() within Python's limit on digits.
    number = int(digits, base) if len(digits) <= 40 else _INTEGER_LIMIT
    if abs(number) >= _INTEGER_LIMIT:
        raise ValueError(f"{printable(text, 40)} is too large a number")
    return number
