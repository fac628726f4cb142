"""Which requests bring an id that an earlier one has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTES = 16


class CustomIds:
    """Ids of requests, in order: 16 bytes of each are kept, a hash that has no collisions."""

    def __init__(self) -> None:
        self._digests = bytearray()

    def add(self, ids: Sequence[Any]) -> None:
        """The ids of the next requests; what is no text is the same as no other."""
        for value in ids:
            row = len(self._digests) // _BYTES
            text = f"id {value}" if isinstance(value, str) else f"row {row}"
            self._digests += hashlib.blake2b(text.encode(), digest_size=_BYTES).digest()

    def is_repeated(self, row: int) -> bool:
        """Whether an earlier request than ``row`` has its id; all were added before."""
        at = int(np.searchsorted(self._repeated, row))
        return at < len(self._repeated) and int(self._repeated[at]) == row

    @cached_property
    def _repeated(self) -> npt.NDArray[np.int64]:
        digests = np.frombuffer(bytes(self._digests), dtype=[("a", "<u8"), ("b", "<u8")])
        order = np.argsort(digests, order=("a", "b"), kind="stable")
        same = digests[order][1:] == digests[order][:-1]
        return np.sort(order[1:][same])
