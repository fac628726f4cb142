"""The driver's log: who came, who went, and why."""

from __future__ import annotations

from datetime import datetime
from typing import BinaryIO

from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import storage_errors


class DriverLog:
    """Lines with the time before them, added to a file in ``_batchinfer/logs``.

    Args:
        run_id: the name of the file.
    """

    def __init__(self, out: OutputDir, run_id: str) -> None:
        self._out = out
        self._path = out.logs / f"{run_id}.log"
        self._file: BinaryIO | None = None

    def __call__(self, line: str) -> None:
        """Add a line; line breaks in it, as in errors with a hint, become spaces.

        Raises:
            StorageError: it cannot be written.
        """
        now = datetime.now().isoformat(timespec="milliseconds")
        with storage_errors(self._path):
            if self._file is None:
                self._file = self._out.files.append_to(self._path)
            self._file.write(f"{now} {' '.join(line.splitlines())}\n".encode())

    def close(self) -> None:
        """Close the file; the next line would open it again."""
        if self._file is not None:
            with storage_errors(self._path):
                self._file.close()
            self._file = None

    def begin_again_if_gone(self) -> None:
        """Have the next line begin a new file, where this one was deleted with other output."""
        if self._out.files.stat(self._path) is None:
            self.close()
