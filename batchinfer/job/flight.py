"""Which rows are being made into prompts or are in the engine, for the run after one that dies.

``_batchinfer/in_flight/<run id>`` holds row ids, 8 bytes each: a row's when its prompt is about to
be made, its complement (``~id``) when that is made, its id again when it is handed to the engine.
A run that ends in order deletes the file. It is not synced: what matters is that the process dies,
and what it has written outlives that. In a store it does so some seconds later only, too late for
a row that kills at once: after a death the next run has each row there before it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePath
from typing import Self

import numpy as np
import numpy.typing as npt

from batchinfer.errors import JobError
from batchinfer.job.output import OutputDir
from batchinfer.job.row_ids import RowIds, sorted_row_ids, within
from batchinfer.job.storage.filesystem import read_file, storage_errors
from batchinfer.job.suspects import Suspicion, suspicion_from

_ROW = np.dtype("<i8")


class FlightLog:
    """Keeps the rows of a run that may be what it dies of.

    Args:
        out: the output directory.
        run_id: the run.
        at_once: where it is a store, have each row there before it runs; else seconds later.
    """

    def __init__(self, out: OutputDir, run_id: str, *, at_once: bool = False) -> None:
        self._files = out.files
        self._path = out.in_flight / run_id
        with storage_errors(self._path):
            self._file = out.files.append_to(self._path, at_once=at_once)

    def note(self, row_ids: Sequence[int]) -> None:
        """Say that these rows are about to be given to the engine.

        Raises:
            StorageError: it cannot be written.
        """
        self._write(np.array(row_ids, dtype=_ROW))

    @contextmanager
    def making(self, row_ids: Sequence[int]) -> Iterator[None]:
        """Within, these rows are made into prompts.

        Raises:
            StorageError: that cannot be written.
        """
        rows = np.array(row_ids, dtype=_ROW)
        self._write(rows)
        yield
        self._write(~rows)

    def _write(self, entries: npt.NDArray[np.int64]) -> None:
        with storage_errors(self._path):
            self._file.write(entries.tobytes())  # one write: two threads may note rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the log; a run that ended in order, or for a reason it could name, leaves none."""
        self._file.close()
        if kind is None or issubclass(kind, JobError):
            self._files.delete(self._path)


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


def _given(out: OutputDir, log: PurePath) -> RowIds:
    try:
        data = read_file(out.files, log)
    except OSError:
        return sorted_row_ids(())
    whole = len(data) - len(data) % _ROW.itemsize  # the last write may have been cut short
    return _open_rows(np.frombuffer(data[:whole], dtype=_ROW))


def _open_rows(entries: npt.NDArray[np.int64]) -> RowIds:
    """Rows whose last entry is their id."""
    latest = entries[::-1]
    rows, last = np.unique(np.where(latest < 0, ~latest, latest), return_index=True)
    open_rows: RowIds = rows[latest[last] >= 0].astype(np.int64)
    return open_rows
