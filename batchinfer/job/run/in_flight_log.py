"""Log of the rows in flight: what ``claims/crashes.py`` reads when the process has died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Self

import numpy as np
import numpy.typing as npt

from batchinfer.errors import JobError, StorageError
from batchinfer.job.claims.crashes import LOG_ENTRY
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.storage.filesystem import storage_errors


class InFlightLog:
    """The log of the rows in flight, one of which may be what the run dies of."""

    def __init__(self, out: OutputDir, run_id: str) -> None:
        self.at_once = False
        """Whether, in a store, each row is there before it runs, not some seconds later."""
        self._files = out.files
        self._path = out.in_flight / run_id
        with storage_errors(self._path):
            self._file = out.files.append_to(self._path)

    def note(self, row_ids: Sequence[int]) -> None:
        """Log rows that are about to be given to the engine.

        Raises:
            StorageError: it cannot be written.
        """
        self._write(np.array(row_ids, dtype=LOG_ENTRY))

    @contextmanager
    def making(self, row_ids: Sequence[int]) -> Iterator[None]:
        """Log rows as in flight while they are made into prompts.

        Raises:
            StorageError: it cannot be written.
        """
        rows = np.array(row_ids, dtype=LOG_ENTRY)
        self._write(rows)
        yield
        self._write(~rows)

    def _write(self, entries: npt.NDArray[np.int64]) -> None:
        with storage_errors(self._path):
            self._file.write(entries.tobytes())  # one write: two threads may note rows
            if self.at_once:
                self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the log, and delete it where the run ended in order or with a ``JobError``.

        Raises:
            StorageError: that fails, and the run ended in order; else its own error says more.
        """
        own_error_first = suppress(StorageError) if kind else nullcontext()
        with own_error_first:
            with storage_errors(self._path):
                self._file.close()  # writes what a store has not got yet
            if kind is None or issubclass(kind, JobError):
                with storage_errors(self._path, "delete"):
                    self._files.delete(self._path)
