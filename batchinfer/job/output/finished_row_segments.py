"""Segments: immutable files of finished rows whose parts are not finished yet.

A segment holds the rows that finished during an interval of a few seconds, sorted by row id. A
segment has one row group per part, so that a part is written without reading other parts' rows. A
segment is deleted once no unfinished part needs it. If a row is in two segments (see
``claims/retry_errors.py``), the later segment is used.

A segment's name ends in a hash of its bytes, because page checksums do not cover the whole file. If
several writers share the output, a segment's name also has the writer, and the first and last part
with rows in the segment, so that writers of other parts need not open the segment. A writer deletes
only segments without rows of other writers' parts.

In an object store, a request that a run sent just before it froze may arrive after another run has
taken over. For this reason, each segment names its plan in its metadata, and different segments
have different names. A segment that arrives late is therefore never used by another plan, and a
deletion that arrives late never deletes another segment.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.console.format import first_line
from batchinfer.errors import DataError, StorageError
from batchinfer.job.manifest import Manifest
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.output.parquet_bytes import parquet_bytes
from batchinfer.job.output.stats_tables import DISTINCT_TOKENS, REQUEST, with_worker
from batchinfer.job.row_ranges import NO_ROWS, Part, RowIds
from batchinfer.job.rows.finished_row import FinishedRow
from batchinfer.job.rows.row_key import KEY_COLUMN, KEY_TYPE
from batchinfer.job.storage.filesystem import Files, read_file, storage_errors

REQUEST_COLUMN = "request"
CONTROL_TEXT_COLUMN = "has_control_text"
_NAME = re.compile(
    r"segment-(?P<number>\d{6,})-"
    r"((?P<writer>[a-z]\w*)-(?P<first>\d+)-(?P<last>\d+)-)?"
    r"(?P<digest>[0-9a-f]+)\.parquet"
)
_PLAN = b"batchinfer.plan"


def segment_schema(generated: pa.Schema) -> pa.Schema:
    """Return the schema of segments: the generated columns, statistics, flags and keys."""
    added = [(REQUEST_COLUMN, REQUEST), (CONTROL_TEXT_COLUMN, pa.bool_()), (KEY_COLUMN, KEY_TYPE)]
    return pa.schema([*generated, *(pa.field(name, kind) for name, kind in added)])


def segment_table(rows: Iterable[FinishedRow], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist([_segment_row(row) for row in rows], schema=schema)


def _segment_row(row: FinishedRow) -> dict[str, Any]:
    request = None
    if row.stats is not None:
        request = asdict(row.stats) | {DISTINCT_TOKENS: row.distinct_tokens} | asdict(row.tally)
    return {
        **row.values,
        REQUEST_COLUMN: request,
        CONTROL_TEXT_COLUMN: row.has_control_text,
        KEY_COLUMN: row.key,
    }


def with_keys(table: pa.Table) -> pa.Table:
    """Return a segment's table with a column of keys, even if an older version wrote it."""
    if KEY_COLUMN in table.schema.names:
        return table
    return table.append_column(KEY_COLUMN, pa.nulls(table.num_rows, KEY_TYPE))


def read_segment(files: Files, path: PurePath) -> bytes:
    """Return the bytes of a segment, checked against the hash in its name.

    Raises:
        ValueError: the bytes differ from those that were written.
        OSError: the file is missing.
        StorageError: the file cannot be read.
    """
    data, name = read_file(files, path), _NAME.fullmatch(path.name)
    if name is None or _digest(data) != name["digest"]:
        raise ValueError("it has changed since it was written (its hash differs)")
    return data


class Segments:
    """The segments of an output directory.

    Args:
        parts: the unfinished parts of this writer, in order.
        generated: the output's generated columns.
        owned: indices of the parts that no other writer works on; None for all parts.
    """

    def __init__(
        self,
        out: OutputDir,
        plan: Manifest,
        parts: Sequence[Part],
        generated: pa.Schema,
        owned: Collection[int] | None = None,
    ) -> None:
        self.schema = segment_schema(generated)
        self._out = out
        self._plan = f"{plan.fingerprint} {plan.planned_at}".encode()
        self._unfinished = [part.index for part in parts]
        self._planned = plan.parts()
        self._first_rows = [part.rows.start for part in self._planned]
        self._owned = range(len(self._planned)) if owned is None else owned
        self._groups: dict[PurePath, dict[int, int]] = {}
        """For each segment, oldest first: the row group of each part, keyed by the part's index."""
        self._shared: set[PurePath] = set()
        """Segments with rows of other writers' parts, which this writer must not delete."""
        self._next = 0

    def recover(self) -> tuple[RowIds, dict[str, str]]:
        """Find the segments of earlier runs, and delete segments that no part needs.

        Returns:
            The rows of unfinished parts that are in segments, and the problem of each damaged
            segment, keyed by the segment's name. Rows of damaged segments have to run again.

        Raises:
            StorageError: a segment cannot be read, but may be intact.
        """
        ids: list[RowIds] = [NO_ROWS]
        damaged: dict[str, str] = {}
        for path in self._out.files.entries(self._out.segments):
            name = _NAME.fullmatch(path.name)
            first, last = 0, len(self._planned) - 1
            if name is not None:
                self._next = max(self._next, int(name["number"]) + 1)
                if name["writer"] is not None:
                    first, last = int(name["first"]), int(name["last"])
            self._note_owner(path, [first, last])
            if not self._makes_any(first, last):
                self._keep(path, {})
                continue
            try:
                groups = self._read_groups(path)
            except FileNotFoundError:
                continue  # another writer has merged the segment's rows into a part
            except MemoryError as error:  # pyarrow's MemoryError is also an ArrowException
                raise StorageError(
                    f"cannot read {path}: {first_line(error)}",
                    hint="free memory, then run again; finished rows are kept",
                ) from None
            except (OSError, pa.ArrowException, ValueError) as error:
                damaged[path.name] = first_line(error)
                self._keep(path, {})
                continue
            self._note_owner(path, groups)
            mine = {
                index: group for index, group in groups.items() if self._makes_any(index, index)
            }
            self._keep(path, {index: number for index, (number, _) in mine.items()})
            ids += [row_ids for _, row_ids in mine.values()]
        return np.unique(np.concatenate(ids)), damaged

    def add(self, table: pa.Table) -> PurePath:
        """Write a segment, and return its path. The rows of a written segment never run again.

        Args:
            table: rows of unfinished parts, in any order, with the columns of ``schema``.
        """
        table = table.sort_by("row_id").replace_schema_metadata({_PLAN: self._plan})
        parts = [self._part_of(row_id) for row_id in table["row_id"].to_pylist()]
        slices, groups, start = [], {}, 0
        for number, (index, members) in enumerate(groupby(parts)):
            assert self._makes_any(index, index), "a row belongs to no unfinished part"
            length = len(list(members))
            slices.append(table.slice(start, length))
            groups[index] = number
            start += length
        data, writer = parquet_bytes(slices), self._out.writer
        owner = f"{writer}-{min(groups)}-{max(groups)}-" if writer else ""
        path = self._out.segments / f"segment-{self._next:06d}-{owner}{_digest(data)}.parquet"
        self._next += 1
        self._out.write(path, data)
        self._groups[path] = groups
        self._note_owner(path, groups)
        return path

    def rows_of(self, part: Part) -> pa.Table:
        """Return the rows of a part that are in segments, each once, sorted by row id.

        An additional column names the writer that ran each row.

        Raises:
            DataError: a segment was damaged or deleted in the meantime.
            StorageError: a segment cannot be read.
        """
        tables = [with_worker(self.schema.empty_table())]
        for path, groups in reversed(self._groups.items()):
            if part.index in groups:
                name = _NAME.fullmatch(path.name)
                writer = (name and name["writer"]) or ""
                tables.append(with_worker(self._read_group(path, groups[part.index]), writer))
        table = pa.concat_tables(tables)
        _, first = np.unique(table["row_id"].to_numpy(), return_index=True)
        return table.take(first)

    def drop(self, part: Part) -> None:
        """Forget the rows of a finished part, and delete segments without other rows."""
        for path, groups in list(self._groups.items()):
            if groups.pop(part.index, None) is not None:
                self._keep(path, groups)

    def forget_errors(self) -> None:
        """Drop the rows that ended in an error, so that they run again."""
        for path, groups in list(self._groups.items()):
            table = pa.concat_tables(self._read_group(path, group) for group in groups.values())
            good = table.filter(pc.equal(table["status"], "ok"))
            if good.num_rows == table.num_rows:
                continue
            if good.num_rows:
                self.add(good)
            self._keep(path, {})

    def _keep(self, path: PurePath, groups: dict[int, int]) -> None:
        """Record a segment's row groups; delete an empty segment if no other writer needs it."""
        if groups:
            self._groups[path] = groups
            return
        self._groups.pop(path, None)
        if path not in self._shared:
            with storage_errors(path, "delete"):
                self._out.files.delete(path)

    def _part_of(self, row_id: int) -> int:
        return bisect_right(self._first_rows, row_id) - 1

    def _note_owner(self, path: PurePath, indices: Iterable[int]) -> None:
        if all(index in self._owned for index in indices):
            self._shared.discard(path)
        else:
            self._shared.add(path)

    def _makes_any(self, first: int, last: int) -> bool:
        at = bisect_left(self._unfinished, first)
        return at < len(self._unfinished) and self._unfinished[at] <= last

    def _read_groups(self, path: PurePath) -> dict[int, tuple[int, RowIds]]:
        """Check a segment; return each part's row group and row ids, keyed by the part's index."""
        groups: dict[int, tuple[int, RowIds]] = {}
        data = read_segment(self._out.files, path)
        with pq.ParquetFile(pa.BufferReader(data)) as reader:
            if not with_keys(reader.schema_arrow.empty_table()).schema.equals(self.schema):
                raise ValueError("its columns differ from those of this job's segments")
            if (reader.metadata.metadata or {}).get(_PLAN) != self._plan:
                raise ValueError("it belongs to another plan")
            row_ids = reader.read(use_threads=False)["row_id"].to_numpy()
            start = 0
            for group in range(reader.num_row_groups):
                stop = start + reader.metadata.row_group(group).num_rows
                groups[self._part_of(int(row_ids[start]))] = (group, row_ids[start:stop])
                start = stop
        return groups

    def _read_group(self, path: PurePath, group: int) -> pa.Table:
        try:
            with self._out.files.open(path) as file:
                reader = pq.ParquetFile(file, page_checksum_verification=True)
                return with_keys(reader.read_row_group(group, use_threads=False))
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path} cannot be read: {first_line(error)}",
                hint="run the same command again to recompute the rows of this file",
            ) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
