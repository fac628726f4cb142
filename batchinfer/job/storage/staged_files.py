"""Files that are staged in memory, by those who can only bring whole files to where they belong."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import PurePath
from typing import BinaryIO


class StagedFiles:
    """What is staged is in memory until it gets its name, and there is nothing to sync."""

    def __init__(self) -> None:
        self._staged: dict[PurePath, bytes] = {}

    def write(self, path: PurePath, data: bytes) -> None:
        """Stage a file."""
        self._staged[path] = data

    def create(self, path: PurePath) -> BinaryIO:
        """Open a file in memory that is staged when it is closed."""
        return _Staged(lambda data: self.write(path, data))

    def sync(self, path: PurePath) -> None:
        """Nothing to do: what is brought somewhere stays there."""

    def make_directory(self, path: PurePath) -> None:
        """Nothing to do: folders come with what is in them."""

    def can_write(self, directory: PurePath) -> bool:
        """True: whoever may not write finds out when it writes."""
        return True

    def _drop_staged(self, path: PurePath) -> None:
        """Forget a file that is staged, or all below a folder."""
        for staged in [staged for staged in list(self._staged) if staged.is_relative_to(path)]:
            self._staged.pop(staged, None)  # another thread may be done with it by now


class _Staged(BytesIO):
    """A file in memory, kept by ``keep`` when it is closed."""

    def __init__(self, keep: Callable[[bytes], None]) -> None:
        super().__init__()
        self._keep = keep

    def close(self) -> None:
        if not self.closed:
            self._keep(self.getvalue())
        super().close()
