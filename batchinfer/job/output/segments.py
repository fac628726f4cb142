"""Finished rows that are in no part yet: immutable files on disk, read back part by part.

A segment holds the rows that finished in a few seconds, sorted by row id, with a row group for each
part they belong to: making a part reads its rows only. A segment goes when no unfinished part needs
it. A row may be in two segments (see ``claims/retry.py``); the later one counts.

A segment's name ends in a hash of its bytes: page checksums say nothing of the rest of a file. Of
one of several writers it says the writer, and the first and the last part it has rows of: whoever
makes other parts need not open it.

Where several write, each may delete only what has no rows of parts that others make.

In a store, what a run sends off just before it freezes may arrive when others have taken over. So a
segment says which plan it is of, and other rows have another name: what arrives late is taken for
no other plan's, and what is deleted late is nobody else's.
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
from batchinfer.job.row_ids import NO_ROWS, Part, RowIds
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
    """Columns of a segment: those the output generates, statistics, marks and keys of rows."""
    added = [(REQUEST_COLUMN, REQUEST), (CONTROL_TEXT_COLUMN, pa.bool_()), (KEY_COLUMN, KEY_TYPE)]
    return pa.schema([*generated, *(pa.field(name, kind) for name, kind in added)])


def segment_table(rows: Iterable[FinishedRow], schema: pa.Schema) -> pa.Table:
    """Finished rows as a segment's table."""
    return pa.Table.from_pylist([_segment_row(row) for row in rows], schema=schema)


def _segment_row(row: FinishedRow) -> dict[str, Any]:
    request = None
    if row.stats is not None:
        request = {
            **asdict(row.stats),
            DISTINCT_TOKENS: row.distinct_tokens,
            **asdict(row.tally),
        }
    return {
        **row.values,
        REQUEST_COLUMN: request,
        CONTROL_TEXT_COLUMN: row.has_control_text,
        KEY_COLUMN: row.key,
    }


def with_keys(table: pa.Table) -> pa.Table:
    """A segment's table with keys: rows that were finished before there were any have none."""
    if KEY_COLUMN in table.schema.names:
        return table
    return table.append_column(KEY_COLUMN, pa.nulls(table.num_rows, KEY_TYPE))


def read_segment(files: Files, path: PurePath) -> bytes:
    """All bytes of a segment, checked against the hash in its name.

    Raises:
        ValueError: they are not those that were written.
        OSError: it is missing.
        StorageError: it cannot be read.
    """
    data, named = read_file(files, path), _NAME.fullmatch(path.name)
    if named is None or _digest(data) != named["digest"]:
        raise ValueError("it holds other bytes than were written (its hash differs)")
    return data


class Segments:
    """The segments of an output directory.

    Args:
        parts: the parts that are not finished, in order; of several writers: that this one makes.
        generated: the output's generated columns.
        owned: indices of the parts that nobody else makes; None: of all.
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
        """Columns of a segment."""
        self._out = out
        self._plan = f"{plan.fingerprint} {plan.planned_at}".encode()
        self._unfinished = [part.index for part in parts]
        self._planned = plan.parts()
        self._first_rows = [part.rows.start for part in self._planned]
        self._owned = range(len(self._planned)) if owned is None else owned
        self._groups: dict[PurePath, dict[int, int]] = {}
        """Segments, oldest first: index of a part, and the row group of its rows."""
        self._shared: set[PurePath] = set()
        """Segments with rows of parts that others make, which are theirs to delete."""
        self._next = 0

    def recover(self) -> tuple[RowIds, dict[str, str]]:
        """Find the segments that earlier runs have left; those nobody needs are deleted.

        Returns:
            The rows of unfinished parts that are in segments; and the segments that are damaged,
            whose rows have to run again: name, and what is wrong.

        Raises:
            StorageError: one cannot be read, which does not say that it is damaged.
        """
        found: list[RowIds] = [NO_ROWS]
        damaged: dict[str, str] = {}
        for path in self._out.files.entries(self._out.segments):
            named = _NAME.fullmatch(path.name)
            if named is not None:
                self._next = max(self._next, int(named["number"]) + 1)
            first, last = self._range_in(named)
            self._note_owner(path, [first, last])
            if not self._makes_any(first, last):
                self._keep(path, {})
                continue
            try:
                found.append(self.adopt(path))
            except FileNotFoundError:
                continue  # another writer has put its rows into a part
            except (OSError, pa.ArrowException, ValueError) as error:
                damaged[path.name] = first_line(error)
                self._keep(path, {})
        return np.unique(np.concatenate(found)), damaged

    def adopt(self, path: PurePath) -> RowIds:
        """Take up a segment that is there, whoever wrote it; its rows of unfinished parts.

        Raises:
            ValueError, pyarrow.ArrowException: it is damaged.
            OSError: it is missing.
            StorageError: it cannot be read.
        """
        try:
            groups = self._read_groups(path)
        except MemoryError as error:  # pyarrow's is an ArrowException as well
            raise StorageError(
                f"cannot read {path}: {first_line(error)}",
                hint="free memory, then run again: finished rows are kept",
            ) from None
        self._note_owner(path, groups)
        mine = {index: found for index, found in groups.items() if self._makes_any(index, index)}
        self._keep(path, {index: group for index, (group, _) in mine.items()})
        return np.concatenate([NO_ROWS, *(row_ids for _, row_ids in mine.values())])

    def add(self, table: pa.Table) -> PurePath:
        """Write a segment; when this returns, its rows will not run again.

        Args:
            table: rows of unfinished parts, in any order, with the columns of ``schema``.

        Returns:
            Its file.

        Raises:
            StorageError: it cannot be written.
        """
        table = table.sort_by("row_id").replace_schema_metadata({_PLAN: self._plan})
        row_ids = table["row_id"].to_numpy()
        parts = [self._part_of(row_id) for row_id in row_ids.tolist()]
        slices, groups, start = [], {}, 0
        for number, (index, members) in enumerate(groupby(parts)):
            assert self._makes_any(index, index), "a row of no unfinished part"
            length = len(list(members))
            slices.append(table.slice(start, length))
            groups[index] = number
            start += length
        data = parquet_bytes(slices)
        path = self._out.segments / self._name(_digest(data), min(groups), max(groups))
        self._next += 1
        self._out.write(path, data)
        self._groups[path] = groups
        self._note_owner(path, groups)
        return path

    def rows_of(self, part: Part) -> pa.Table:
        """The rows of a part that are in segments, each once, sorted by row id, and who made them.

        Raises:
            DataError: a segment is damaged or missing by now.
            StorageError: one cannot be read.
        """
        tables = [with_worker(self.schema.empty_table())]
        for path, groups in reversed(self._groups.items()):
            if part.index in groups:
                rows = self._read_group(path, groups[part.index])
                tables.append(with_worker(rows, _writer_of(path)))
        table = pa.concat_tables(tables)
        _, first = np.unique(table["row_id"].to_numpy(), return_index=True)
        return table.take(first)

    def drop(self, part: Part) -> None:
        """Forget the rows of a part, which is finished now; delete segments that hold no others."""
        for path, groups in list(self._groups.items()):
            if groups.pop(part.index, None) is not None:
                self._keep(path, groups)

    def forget_errors(self) -> None:
        """Drop the rows that ended in an error, so that they run again.

        Raises:
            StorageError: what is left of a segment cannot be written.
        """
        for path, groups in list(self._groups.items()):
            table = pa.concat_tables(self._read_group(path, group) for group in groups.values())
            good = table.filter(pc.equal(table["status"], "ok"))
            if good.num_rows == table.num_rows:
                continue
            if good.num_rows:
                self.add(good)
            self._keep(path, {})

    def _keep(self, path: PurePath, groups: dict[int, int]) -> None:
        """Note the groups of a segment; delete one without any, if nobody else may need it."""
        if groups:
            self._groups[path] = groups
            return
        self._groups.pop(path, None)
        if path not in self._shared:
            with storage_errors(path, "delete"):
                self._out.files.delete(path)

    def _name(self, digest: str, first: int, last: int) -> str:
        writer = self._out.writer
        by = f"{writer}-{first}-{last}-" if writer else ""
        return f"segment-{self._next:06d}-{by}{digest}.parquet"

    def _part_of(self, row_id: int) -> int:
        """Index of the planned part that a row is in."""
        return bisect_right(self._first_rows, row_id) - 1

    def _range_in(self, named: re.Match[str] | None) -> tuple[int, int]:
        """First and last part that a segment may have rows of, by its name."""
        if named is None or named["writer"] is None:
            return 0, len(self._planned) - 1
        return int(named["first"]), int(named["last"])

    def _note_owner(self, path: PurePath, indices: Iterable[int]) -> None:
        if all(index in self._owned for index in indices):
            self._shared.discard(path)
        else:
            self._shared.add(path)

    def _makes_any(self, first: int, last: int) -> bool:
        """Whether one of the parts to make is among some consecutive ones."""
        at = bisect_left(self._unfinished, first)
        return at < len(self._unfinished) and self._unfinished[at] <= last

    def _read_groups(self, path: PurePath) -> dict[int, tuple[int, RowIds]]:
        """Row group and row ids by the index of their part; all of the segment is checked."""
        groups: dict[int, tuple[int, RowIds]] = {}
        data = read_segment(self._out.files, path)
        with pq.ParquetFile(pa.BufferReader(data)) as reader:
            if not with_keys(reader.schema_arrow.empty_table()).schema.equals(self.schema):
                raise ValueError("it has other columns than a segment of this job")
            if (reader.metadata.metadata or {}).get(_PLAN) != self._plan:
                raise ValueError("it is of another plan")
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
                hint="run the same command again: its rows are then computed again",
            ) from error


def _writer_of(path: PurePath) -> str:
    named = _NAME.fullmatch(path.name)
    return (named and named["writer"]) or ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
