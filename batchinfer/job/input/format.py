"""The formats of a dataset's files, and one of its files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from batchinfer.errors import DataError, RowError
from batchinfer.job.storage.filesystem import FileStat
from batchinfer.job.storage.reader import store_of

BATCH_ROWS = 1024
"""Most rows read at a time."""
MEND = "write it again, or leave it out of input.path"
SAMPLING_COLUMN = "sampling_params"
"""The column that holds a row's own sampling parameters."""
READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Errors of reading a file; the last one is of names of columns."""

Row = Mapping[str, Any] | RowError
"""A row's values by column, or why it cannot be read."""
Rows = tuple[int, list[Row]]
"""The first row's id, and rows that follow each other."""
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the dataset, as it was when it was planned."""

    path: str
    size: int
    mtime_ns: int
    num_rows: int
    content_sha256: str
    """Of a Parquet file's footer; of other files' content, decompressed."""
    etag: str | None = None
    """An object store's mark of the content."""
    ctime_ns: int = field(default=0, compare=False)
    """For within a run: between runs a file may be copied or moved, and be the same."""
    content_hash: str | None = None
    """Of all that is in it: ``content_hash`` of a Parquet file, else ``content_sha256``. None: not
    known; in a store ``etag`` tells."""
    partition: Mapping[str, str | None] | None = None
    """Columns that the names of its folders hold, and their values; None: not known."""

    @classmethod
    def of(
        cls,
        path: str,
        stat: FileStat,
        num_rows: int,
        content_sha256: str,
        content_hash: str | None = None,
    ) -> InputFile:
        """A file as ``stat`` has it, without columns of folders."""
        facts = (stat.size, stat.mtime_ns, num_rows, content_sha256, stat.etag, stat.ctime_ns)
        return cls(path, *facts, content_hash, {})


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Columns of some rows of one file."""

    file: InputFile
    first_row: int
    """Row id of the first row of the file."""
    columns: Sequence[str]
    schema: pa.Schema
    """Of the whole dataset."""
    wanted: deque[range]
    """Row ids, ascending and disjoint, of later files as well; what is read is dropped from it."""


class Format(Protocol):
    """A kind of file that holds rows.

    Methods that read raise DataError, naming the file, where it cannot be read. What is read at a
    time is at most ``BATCH_ROWS`` rows, all of one range.
    """

    holds_requests: bool
    """Whether each row says itself what its prompt is, and how it is sampled."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        """Size, rows and hash of a file, and its columns."""
        ...

    def common_schema(self, files: Sequence[InputFile], schemas: Sequence[pa.Schema]) -> pa.Schema:
        """The columns of several files together; DataError where they do not go together."""
        ...

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches of columns, each with its first row's id."""
        ...

    def rows(self, request: ReadRequest) -> Iterator[Rows]:
        """Rows as Python's values."""
        ...

    def stored_bytes(self, file: InputFile, columns: Collection[str]) -> int:
        """About how many bytes the columns will take in an output file."""
        ...


def check_unchanged(file: InputFile) -> None:
    """Check that a file is still the one that was planned.

    Raises:
        DataError: it was written again.
        OSError: it is not there any more.
    """
    stat = store_of(file.path).stat(file.path)
    if (stat.size, stat.mtime_ns, stat.etag) != (file.size, file.mtime_ns, file.etag):
        raise DataError(
            f"{file.path} was changed while the job ran",
            hint="put it back and run again, or start over with --overwrite",
        )
    if stat.ctime_ns != file.ctime_ns:  # size and time can be those of before on purpose
        raise DataError(
            f"{file.path} was changed while the job ran, or its name, links or permissions were",
            hint="if its content is as before, run again: finished rows are kept; if not, start "
            "over with --overwrite",
        )


def cut(
    batch: _Item,
    length: int,
    row: int,
    wanted: deque[range],
    piece: Callable[[_Item, int, int], _Item],
) -> Iterator[tuple[int, _Item]]:
    """Pieces of a batch that ``wanted`` asks for, each with its first row's id.

    Ranges that the batch completes are dropped from ``wanted``.

    Args:
        batch: rows.
        length: rows in it.
        row: id of its first row.
        wanted: row ids, ascending and disjoint.
        piece: makes a smaller batch: of which, from where, how many.
    """
    stop = row + length
    while wanted and wanted[0].start < stop:
        rows = range(max(wanted[0].start, row), min(wanted[0].stop, stop))
        if rows:
            yield rows.start, piece(batch, rows.start - row, len(rows))
        if wanted[0].stop > stop:
            return
        wanted.popleft()
