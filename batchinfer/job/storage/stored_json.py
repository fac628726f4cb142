"""JSON as an output directory holds it: whole, torn, or whatever else has got there."""

from __future__ import annotations

import json
from typing import Any


def parse(data: bytes) -> Any:
    """What ``data`` says.

    Raises:
        ValueError: it is no JSON, or none that can be read.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
