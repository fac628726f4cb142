"""Logs the rows in flight; ``claims/crashed_rows.py`` reads the log after the process has died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Self

import numpy as np
import numpy.typing as npt

from batchinfer.errors import JobError, StorageError
from batchinfer.job.claims.crashed_rows import LOG_ENTRY
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import storage_errors


class InFlightLog:
    """Logs the rows in flight, so that later runs can find a row that kills the process.

    The methods raise StorageError if the log cannot be written.
    """

    def __init__(self, out: OutputDir, run_id: str) -> None:
        self.at_once = False
        """True to write each row to the store before the row runs, not seconds later."""
        self._files = out.files
        self._path = out.in_flight / run_id
        with storage_errors(self._path):
            self._file = out.files.append_to(self._path)

    def note(self, row_ids: Sequence[int]) -> None:
        self._write(np.array(row_ids, dtype=LOG_ENTRY))

    @contextmanager
    def making(self, row_ids: Sequence[int]) -> Iterator[None]:
        """Log rows as in flight while their prompts are built."""
        rows = np.array(row_ids, dtype=LOG_ENTRY)
        self._write(rows)
        yield
        self._write(~rows)

    def _write(self, entries: npt.NDArray[np.int64]) -> None:
        with storage_errors(self._path):
            self._file.write(entries.tobytes())  # one write, because two threads may log rows
            if self.at_once:
                self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the log; delete it if the run ended normally or with a ``JobError``.

        If the run failed, ignore storage errors, because the run's own error is more important.
        """
        with suppress(StorageError) if kind else nullcontext():
            with storage_errors(self._path):
                self._file.close()  # closing may write the last entries to a store
            if kind is None or issubclass(kind, JobError):
                with storage_errors(self._path, "delete"):
                    self._files.delete(self._path)
