"""Which rows the engine has been given, on disk, for the run after one that dies.

``_batchinfer/in_flight/<run id>`` holds row ids, 8 bytes each, as they were handed to the engine;
a run that ends in order deletes it. It is not synced: what matters is that the process dies, and
what it has written outlives that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from batchinfer.errors import JobError
from batchinfer.job.files import read_file, storage_errors
from batchinfer.job.output import OutputDir
from batchinfer.job.row_ids import RowIds, sorted_row_ids, within
from batchinfer.job.suspects import Suspicion, suspicion_from

_ROW = np.dtype("<i8")


class FlightLog:
    """Keeps the rows of a run that are given to its engine."""

    def __init__(self, out: OutputDir, run_id: str) -> None:
        self._path = out.in_flight / run_id
        with storage_errors(self._path):
            self._file = self._path.open("ab", buffering=0)

    def note(self, row_ids: Iterable[int]) -> None:
        """Say that these rows are about to be given to the engine.

        Raises:
            StorageError: it cannot be written.
        """
        with storage_errors(self._path):
            self._file.write(np.fromiter(row_ids, dtype=_ROW).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the log; a run that ended in order, or for a reason it could name, leaves none."""
        self._file.close()
        if kind is None or issubclass(kind, JobError):
            self._path.unlink(missing_ok=True)


def assess(out: OutputDir, missing: Sequence[range]) -> Suspicion:
    """What the deaths of earlier runs say; each is counted once.

    Args:
        out: the output directory.
        missing: rows that are not finished, in order.

    Raises:
        StorageError: what was found cannot be written down.
    """
    suspicion = _remembered(out)
    logs = out.files.entries(out.in_flight)
    for log in logs:
        if log.name != suspicion.last_run:  # else a run has died between these two writes
            given = _given(out, log)
            in_flight = within(given, missing)
            finished = np.setdiff1d(given, in_flight, assume_unique=True)
            suspicion = suspicion.after_death(
                log.name, set(in_flight.tolist()), set(finished.tolist())
            )
    unfinished = within(sorted_row_ids(suspicion.rows), missing)
    suspicion = suspicion.among(set(unfinished.tolist()))
    if logs:
        out.write(out.suspects, suspicion.to_json())
    for log in logs:
        with storage_errors(log):
            out.files.delete(log)
    return suspicion


def forgive(out: OutputDir) -> None:
    """Let the rows that were given up run again.

    Raises:
        StorageError: that cannot be written down.
    """
    suspicion = _remembered(out)
    if suspicion.given_up:
        out.write(out.suspects, replace(suspicion, given_up=()).to_json())


def _remembered(out: OutputDir) -> Suspicion:
    try:
        return suspicion_from(read_file(out.files, out.suspects))
    except OSError:
        return Suspicion()


def _given(out: OutputDir, log: Path) -> RowIds:
    try:
        data = read_file(out.files, log)
    except OSError:
        return sorted_row_ids(())
    whole = len(data) - len(data) % _ROW.itemsize  # the last write may have been cut short
    return sorted_row_ids(np.frombuffer(data[:whole], dtype=_ROW))
