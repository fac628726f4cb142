"""Token ids of many rows: in memory up to a budget, beyond it in files that have no name."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.engine.request import TokenIds
from batchinfer.job.storage.filesystem import storage_errors

BUDGET_BYTES = 256 * 2**20
"""Token ids that one store keeps in memory: about 64 million."""

Key = npt.NDArray[np.uint32]
"""[tokens] Token ids, big-endian: their bytes compare as the ids do."""
_KEY = np.dtype(">u4")


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows one after the other."""

    ids: Key
    lengths: npt.NDArray[np.int64]
    """[rows] tokens of each."""

    def rows(self) -> list[Key]:
        stops = self.lengths.cumsum()
        spans = zip((stops - self.lengths).tolist(), stops.tolist(), strict=True)
        return [self.ids[start:stop] for start, stop in spans]

    def as_arrow(self) -> pa.LargeBinaryArray:
        offsets = np.concatenate([[0], self.lengths.cumsum()]) * _KEY.itemsize
        buffers = [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(self.ids)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(self.lengths), buffers)


class TokenStore:
    """Token ids of rows, to be compared and read back.

    What is over the budget is written to files that lose their names as they are made, and that
    are gone when the last who reads them is, be it by ``kill -9``.

    Args:
        folder: where such files go; None: the system's own place.
        budget_bytes: most bytes kept in memory.
    """

    def __init__(self, folder: Path | None, budget_bytes: int = BUDGET_BYTES) -> None:
        self._folder = folder
        self._budget = budget_bytes
        self._filed: list[_Chunk] = []
        self._held: list[_Chunk] = []
        self._held_bytes = 0

    def add(self, rows: Sequence[TokenIds]) -> None:
        """Append rows.

        Raises:
            StorageError: the file cannot be written.
        """
        chunk = _Chunk(
            np.concatenate([np.empty(0, _KEY), *rows], dtype=_KEY, casting="unsafe"),
            np.array([len(ids) for ids in rows], dtype=np.int64),
        )
        self._held.append(chunk)
        self._held_bytes += chunk.ids.nbytes
        if self._held_bytes > self._budget:
            self._spill()

    def rows(self) -> list[Key]:
        """The keys of all rows, in order."""
        return [key for chunk in self._chunks for key in chunk.rows()]

    def as_arrow(self) -> pa.ChunkedArray:
        """``rows`` as large_binary, without a copy."""
        return pa.chunked_array([chunk.as_arrow() for chunk in self._chunks], pa.large_binary())

    @property
    def _chunks(self) -> list[_Chunk]:
        return [*self._filed, *self._held]

    def _spill(self) -> None:
        """Move all that is in memory to one file."""
        folder = Path(tempfile.gettempdir()) if self._folder is None else self._folder
        with storage_errors(folder), tempfile.TemporaryFile(dir=folder) as file:
            for chunk in self._held:
                # By writing, not through the map: a full disk is then an error.
                file.write(chunk.ids.data)
            file.flush()
            ids: Key = np.memmap(file, dtype=_KEY, mode="r").view(np.ndarray)  # slices sooner
        self._filed.append(_Chunk(ids, np.concatenate([chunk.lengths for chunk in self._held])))
        self._held, self._held_bytes = [], 0


def token_ids(key: Key) -> TokenIds:
    """The token ids of a key, in memory."""
    return key.astype(np.int32)
