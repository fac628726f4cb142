"""How values are read and shown: sizes in bytes, and texts for messages."""

from __future__ import annotations

import json
import re

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(value: str | int | float, key: str) -> int:
    """Bytes meant by ``"40GiB"``, ``"512 MB"`` or a bare number, which is GiB.

    Raises:
        ValueError: naming ``key``, when the text is not a size.
    """
    match = _SIZE.fullmatch(str(value))
    if isinstance(value, bool) or match is None:
        raise ValueError(f"{key}: {json.dumps(value)} is not a size; write it like 40GiB or 512MiB")
    number, unit = match.groups()
    return int(float(number) * _UNITS[(unit or "GiB").lower()])


def shown(value: object) -> str:
    """A value as a job file writes it, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
