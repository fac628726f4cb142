"""How much of a token store lies in files."""

from __future__ import annotations

import mmap
from typing import Any

from batchinfer.job.rows.token_store import TokenStore


def bytes_in_files(store: TokenStore) -> int:
    """Bytes of a store's token ids that are read through a file's map."""
    return sum(key.nbytes for key in store.rows() if _is_mapped(key))


def _is_mapped(array: Any) -> bool:
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array is not None
