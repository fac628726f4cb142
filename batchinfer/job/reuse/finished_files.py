"""Reads files of finished rows in an output directory: parts, and segments of unfinished parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.explode import whole_rows
from batchinfer.job.output.part_record import PartRecord
from batchinfer.job.output.segments import read_segment, with_keys
from batchinfer.job.row_ids import Part
from batchinfer.job.rows.row_key import KEY_COLUMN, KEYS_SCHEMA
from batchinfer.job.storage.filesystem import read_file


@dataclass(frozen=True)
class FinishedFile:
    """A part or a segment of an output."""

    out: OutputDir
    path: PurePath
    record: PartRecord | None
    """Record of a part; None for a segment, whose name holds its hash."""

    def check(self) -> None:
        """Check that the file has not changed since it was written.

        Raises:
            DataError: the file is damaged or missing.
            StorageError: the file cannot be read, but may be intact.
        """
        if self.record is None:
            self._bytes()
            return
        found = self.out.check_size(self.path, self.record.size)
        if found.etag is None or found.etag != self.record.etag:
            self.out.check_hash(self.path, self.record.sha256)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Read some columns, with one row for each input row, sorted by row id.

        Raises:
            DataError, StorageError: see ``check``.
        """
        try:
            reader = pa.BufferReader(self._bytes())
            table = pq.read_table(reader, columns=list(columns), use_threads=False)
            return whole_rows(table).select(columns)
        except (pa.ArrowException, KeyError) as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}") from None

    def _bytes(self) -> bytes:
        try:
            if self.record is None:
                return read_segment(self.out.files, self.path)
            data = read_file(self.out.files, self.path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read: {first_line(error)}") from None
        if hashlib.sha256(data).hexdigest() != self.record.sha256:
            raise DataError(f"{self.path} holds other bytes than were written (its hash differs)")
        return data


Keyed = tuple[FinishedFile, pa.Table]
"""A file, and the keys of its rows with ``KEYS_SCHEMA``."""


def keyed_files(out: OutputDir, plan: Manifest) -> Iterator[Keyed]:
    """Yield intact files of ``out`` with the keys of their rows.

    Raises:
        StorageError: a file cannot be read.
    """
    # Read before parts, because rows move from segments to parts.
    segments = list(out.files.entries(out.segments))
    for found in out.of_each(partial(_part, out), plan.parts()):
        if found is not None:
            yield found
    for path in segments:
        keys = _segment_keys(out, path)
        if keys is not None:
            yield FinishedFile(out, path, None), keys


def _part(out: OutputDir, part: Part) -> Keyed | None:
    try:
        record = out.read_record(part)
    except DataError:
        return None
    keys = None if record is None else out.read_keys(part, record)
    return None if keys is None else (FinishedFile(out, out.part_file(part), record), keys)


def _segment_keys(out: OutputDir, path: PurePath) -> pa.Table | None:
    try:
        reader = pa.BufferReader(read_segment(out.files, path))
        table = with_keys(pq.read_table(reader, use_threads=False))
    except (OSError, ValueError, pa.ArrowException):
        return None
    good = table.filter(pc.and_(pc.equal(table["status"], "ok"), table[KEY_COLUMN].is_valid()))
    return good.select(KEYS_SCHEMA.names)
