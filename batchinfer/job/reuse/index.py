"""Index of row keys: which file holds the row with a key. 28 bytes a row, looked up by batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.job.rows.row_key import KEY_BYTES, KEY_COLUMN

NOT_FOUND = -1
"""In place of a file's number."""
_NO_KEY = bytes(KEY_BYTES)
_KEY = np.dtype(f"S{KEY_BYTES}")
"""Of one length, so that the zeros that NumPy pads with make no difference."""


class KeyIndex:
    """Sorted keys, each with a file and the id its row has there.

    Args:
        files: ``KEYS_SCHEMA`` of each file; of rows with one key the first counts.
    """

    def __init__(self, files: Iterable[pa.Table]) -> None:
        tables = list(files)
        keys = np.frombuffer(b"".join(map(_key_bytes, tables)), _KEY)
        sizes = [table.num_rows for table in tables]
        numbers = np.repeat(np.arange(len(tables), dtype=np.int32), sizes)
        row_ids = np.concatenate([np.empty(0, np.int64), *(t["row_id"].to_numpy() for t in tables)])
        self._keys, first = np.unique(keys, return_index=True)
        self._files, self._row_ids = numbers[first], row_ids[first]

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self._keys.nbytes + self._files.nbytes + self._row_ids.nbytes

    def find(
        self, keys: Sequence[bytes | None]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """File and row id there of each key; ``NOT_FOUND`` for one that is nowhere, or None."""
        if not len(self):
            return np.full(len(keys), NOT_FOUND, np.int32), np.zeros(len(keys), np.int64)
        wanted = np.frombuffer(b"".join(_NO_KEY if key is None else key for key in keys), _KEY)
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self) - 1)
        is_found = (self._keys[at] == wanted) & [key is not None for key in keys]
        return np.where(is_found, self._files[at], np.int32(NOT_FOUND)), self._row_ids[at]


def _key_bytes(table: pa.Table) -> bytes:
    chunks = table[KEY_COLUMN].chunks
    return b"".join(
        memoryview(chunk.buffers()[1])[
            KEY_BYTES * chunk.offset : KEY_BYTES * (chunk.offset + len(chunk))
        ]
        for chunk in chunks
        if len(chunk)
    )
