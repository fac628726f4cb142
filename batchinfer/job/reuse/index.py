"""Index of row keys: which file holds the row with a key. 28 bytes a row, looked up by batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.job.rows.row_key import KEY_BYTES, KEY_COLUMN

Words = npt.NDArray[np.uint64]
FileNumbers = npt.NDArray[np.int32]
RowNumbers = npt.NDArray[np.int64]

NOT_FOUND = -1
"""In place of a file's number."""
_NO_KEY = bytes(KEY_BYTES)


class KeyIndex:
    """Sorted keys, each with a file and the id its row has there.

    Args:
        files: ``KEYS_SCHEMA`` of each file; of rows with one key the first counts.
    """

    def __init__(self, files: Iterable[pa.Table]) -> None:
        tables = list(files)
        high, low = _words(b"".join(map(_key_bytes, tables)))
        sizes = [table.num_rows for table in tables]
        numbers = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
        row_ids = np.concatenate([np.empty(0, np.int64), *(t["row_id"].to_numpy() for t in tables)])
        order = np.lexsort((low, high))  # stable: the first of equal keys stays the first
        high, low = high[order], low[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        self._high, self._low = high[is_first], low[is_first]
        self._files = numbers[order][is_first]
        self._row_ids = row_ids[order][is_first]

    def __len__(self) -> int:
        return len(self._high)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return sum(a.nbytes for a in (self._high, self._low, self._files, self._row_ids))

    def find(self, keys: Sequence[bytes | None]) -> tuple[FileNumbers, RowNumbers]:
        """File and row id there of each key; ``NOT_FOUND`` for one that is nowhere, or None."""
        found = np.full(len(keys), NOT_FOUND, dtype=np.int32)
        row_ids = np.zeros(len(keys), dtype=np.int64)
        if not len(self):
            return found, row_ids
        high, low = _words(b"".join(_NO_KEY if key is None else key for key in keys))
        at = np.searchsorted(self._high, high)
        # Where half of the key is equal, all of it most often is; if not, look on.
        seeking = np.array([key is not None for key in keys], dtype=np.bool_)
        while True:
            seeking &= at < len(self)
            seeking[seeking] = self._high[at[seeking]] == high[seeking]
            is_equal = seeking.copy()
            is_equal[seeking] = self._low[at[seeking]] == low[seeking]
            found[is_equal] = self._files[at[is_equal]]
            row_ids[is_equal] = self._row_ids[at[is_equal]]
            seeking &= ~is_equal
            if not seeking.any():
                return found, row_ids
            at = at + 1


def _key_bytes(table: pa.Table) -> bytes:
    chunks = table[KEY_COLUMN].chunks
    return b"".join(
        memoryview(chunk.buffers()[1])[
            KEY_BYTES * chunk.offset : KEY_BYTES * (chunk.offset + len(chunk))
        ]
        for chunk in chunks
        if len(chunk)
    )


def _words(keys: bytes) -> tuple[Words, Words]:
    """Keys one after the other as two words each."""
    pairs = np.frombuffer(keys, dtype=">u8").reshape(-1, 2).astype(np.uint64)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
