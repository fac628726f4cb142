"""Which files of tokens are needed, by which rows, and how much of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from batchinfer.job.tokens.record import TokenRecord

SPARED_BYTES = 8 << 20
"""Of no use any more, before what is of use is worth rewriting."""
MOST_FILES = 512
"""What is drawn in 40 minutes; they are read in seconds."""


@dataclass(slots=True)
class _File:
    """A file that somebody needs."""

    size: int
    num_tokens: int
    needed: Counter[bytes]
    """Tokens in it of each request that is not done, by its key."""


class FileUse:
    """Files of tokens, in the order they are read, and what of them is needed."""

    def __init__(self) -> None:
        self._files: dict[PurePath, _File] = {}
        self._keys_of_row: dict[int, set[bytes]] = {}

    @property
    def paths(self) -> list[PurePath]:
        """The files that are needed."""
        return list(self._files)

    @property
    def keys(self) -> set[bytes]:
        """Keys of the requests that need them."""
        return {key for file in self._files.values() for key in file.needed}

    @property
    def size(self) -> int:
        """Bytes in the files."""
        return sum(file.size for file in self._files.values())

    @property
    def is_wasteful(self) -> bool:
        """Whether what is needed had better be in one file: most of the bytes are of no use, or the
        files are many."""
        needed = sum(
            file.size * file.needed.total() / max(1, file.num_tokens)
            for file in self._files.values()
        )
        return len(self._files) > MOST_FILES or self.size > 2 * needed + SPARED_BYTES

    def add(self, path: PurePath, size: int, records: Sequence[TokenRecord]) -> None:
        """Count a file; what its records make void is needed no longer.

        Args:
            size: in bytes.
            records: those that are needed.
        """
        for record in records:
            if record.starts_over:
                self._forget(record.key)
            self._keys_of_row.setdefault(record.row_id, set()).add(record.key)
        needed = Counter[bytes]()
        for record in records:
            needed[record.key] += len(record.token_ids)
        self._files[path] = _File(size, needed.total(), needed)

    def drop_rows(self, row_ids: Iterable[int]) -> None:
        """Count rows as done."""
        for row_id in row_ids:
            for key in self._keys_of_row.pop(row_id, ()):
                self._forget(key)

    def take_unneeded(self) -> list[PurePath]:
        """The files that nobody needs any more; they are not counted from here on."""
        unneeded = [path for path, file in self._files.items() if not file.needed]
        for path in unneeded:
            del self._files[path]
        return unneeded

    def _forget(self, key: bytes) -> None:
        for file in self._files.values():
            file.needed.pop(key, None)
