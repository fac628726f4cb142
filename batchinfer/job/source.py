"""The prompt dataset: Parquet files read in order as one table, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.errors import DataError
from batchinfer.job.arrow_schema import check_arrow_schema
from batchinfer.job.columns import check_indices
from batchinfer.job.input_files import find_files
from batchinfer.job.messages import listed, printable, shown
from batchinfer.job.parquet_footer import check_footer
from batchinfer.job.store import store_of

BATCH_ROWS = 1024
"""Most rows read at a time."""
_MEND = "write it again, or leave it out of input.path"
_READ_BUFFER = 1 << 20
_MAGIC_BYTES = 8  # a Parquet file ends in the footer's length (4 bytes) and "PAR1"
_READ_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)  # the last: column names


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the dataset, as it was when it was planned."""

    path: str
    size: int
    mtime_ns: int
    num_rows: int
    footer_sha256: str
    etag: str | None = None
    """An object store's mark of the content."""


@dataclass(frozen=True)
class Source:
    """The files of a dataset, read one after the other."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    num_rows: int
    """Rows selected: all, or ``limit``."""

    def require(self, columns: Iterable[str], key: str) -> None:
        """Check that the dataset has ``columns``, which ``key`` of the job file asks for.

        Raises:
            DataError: naming the missing column and the columns there are.
        """
        for name in columns:
            if name not in self.schema.names:
                raise DataError(
                    f"{key}: {self.files[0].path} has no column {shown(name)}",
                    hint=printable(f"its columns are: {listed(self.schema.names)}"),
                )

    def check_unchanged(self) -> None:
        """Check that every file is still the one that was opened.

        Raises:
            DataError: one was written again, or is gone.
        """
        for file in self.files:
            try:
                _check_unchanged(file)
            except OSError as error:
                raise DataError(
                    f"{file.path} cannot be read any more: {error.strerror or error}",
                    hint="put it back, then run again: finished rows are kept",
                ) from None

    def scan(
        self, columns: Sequence[str], ranges: Iterable[range]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read ``columns`` of the rows in ``ranges``, once through the files.

        Args:
            columns: names of top-level columns; batches have them in this order.
            ranges: row ids to read, ascending and disjoint.

        Yields:
            The row id of a batch's first row, and the batch: at most ``BATCH_ROWS`` rows, all
            of one range.

        Raises:
            DataError: naming the file and the row group that cannot be read.
        """
        wanted = deque(rows for rows in ranges if len(rows))
        first_rows = accumulate((file.num_rows for file in self.files), initial=0)
        for file, first_row in zip(self.files, first_rows, strict=False):
            if not wanted:
                return
            if wanted[0].start < first_row + file.num_rows:
                yield from _scan_file(file, first_row, columns, wanted)


def open_source(path: str | Sequence[str], limit: int | None = None) -> Source:
    """Find the files behind ``path`` and check that they can be read together.

    Args:
        path: a file, a glob, a directory (searched for ``*.parquet``), or a list of these, local
            or in an object store.
        limit: use only this many rows.

    Raises:
        DataError: no file, a file that is not readable Parquet, or files of different schemas.
        StorageError: an object store does not answer.
    """
    files: list[InputFile] = []
    schema: pa.Schema | None = None
    for name in find_files(path):
        file, file_schema = _read_footer(name)
        if schema is None:
            _check_names(file.path, file_schema)
            schema = file_schema
        _check_same_schema(files[0] if files else file, schema, file, file_schema)
        files.append(file)
    assert schema is not None
    total = sum(file.num_rows for file in files)
    return Source(tuple(files), schema, total if limit is None else min(total, limit))


def _read_footer(path: str) -> tuple[InputFile, pa.Schema]:
    store = store_of(path)
    try:
        stat = store.stat(path)
        if stat.size == 0:
            raise DataError(f"{path} is empty (0 bytes), not a Parquet file; {_MEND}")
        with store.open(path) as file:
            with _reader(file) as reader:
                num_rows, schema = _num_rows(reader.metadata), reader.schema_arrow
                check_arrow_schema(reader.metadata, schema)
            footer = _footer(file, stat.size)
        check_footer(footer)
    except (*_READ_ERRORS, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet: {_first_line(error)}", hint=_MEND
        ) from error
    digest = hashlib.sha256(footer).hexdigest()
    return InputFile(path, stat.size, stat.mtime_ns, num_rows, digest, stat.etag), schema


def _num_rows(metadata: pq.FileMetaData) -> int:
    rows: int = sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise ValueError(f"its row groups have {rows} rows, its footer says {metadata.num_rows}")
    return rows


def _footer(file: pa.NativeFile, size: int) -> bytes:
    file.seek(size - _MAGIC_BYTES)
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - _MAGIC_BYTES - length))
    return bytes(file.read(length))


def _reader(file: pa.NativeFile) -> pq.ParquetFile:
    return pq.ParquetFile(file, buffer_size=_READ_BUFFER, page_checksum_verification=True)


def _scan_file(
    file: InputFile, first_row: int, columns: Sequence[str], wanted: deque[range]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    group, row = 0, first_row
    try:
        _check_unchanged(file)
        with store_of(file.path).open(file.path) as opened, _reader(opened) as reader:
            for group in range(reader.num_row_groups):
                stop = row + reader.metadata.row_group(group).num_rows
                if wanted and wanted[0].start < stop:
                    for batch in reader.iter_batches(
                        BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False
                    ):
                        for column in batch.columns:
                            check_indices(column)
                        yield from _cut(batch.select(columns), row, wanted)
                        row += len(batch)
                        if not wanted or wanted[0].start >= stop:
                            break
                    else:
                        _check_complete(row, stop)
                row = stop
    except _READ_ERRORS as error:
        raise DataError(
            f"{file.path}: row group {group} cannot be read: {_first_line(error)}",
            hint=f"the file is damaged or has changed; {_MEND}",
        ) from error


def _check_unchanged(file: InputFile) -> None:
    stat = store_of(file.path).stat(file.path)
    if (stat.size, stat.mtime_ns, stat.etag) != (file.size, file.mtime_ns, file.etag):
        raise DataError(
            f"{file.path} was changed while the job ran",
            hint="put it back and run again, or start over with --overwrite",
        )


def _check_complete(row: int, stop: int) -> None:
    if row != stop:
        raise OSError(f"it should have {stop - row} more rows")


def _cut(
    batch: pa.RecordBatch, row: int, wanted: deque[range]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield what ``wanted`` asks of a batch that begins at ``row``; drop ranges it completes."""
    stop = row + len(batch)
    while wanted and wanted[0].start < stop:
        rows = range(max(wanted[0].start, row), min(wanted[0].stop, stop))
        if rows:
            yield rows.start, batch.slice(rows.start - row, len(rows))
        if wanted[0].stop > stop:
            return
        wanted.popleft()


def _check_names(path: str, schema: pa.Schema) -> None:
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(f"{path} has more than one column named {shown(name)}; rename one")


def _check_same_schema(
    first: InputFile, first_schema: pa.Schema, file: InputFile, schema: pa.Schema
) -> None:
    for name in dict.fromkeys([*first_schema.names, *schema.names]):
        here, there = (_type_of(s, name) for s in (first_schema, schema))
        if here != there:
            raise DataError(
                f"input files differ in column {shown(name)}:\n"
                f"  {first.path}: {here or 'no such column'}\n"
                f"  {file.path}: {there or 'no such column'}",
                hint="write them again with the same columns, or run them as jobs of their own",
            )


def _type_of(schema: pa.Schema, name: str) -> pa.DataType | None:
    return schema.field(name).type if name in schema.names else None


def _first_line(error: BaseException) -> str:
    return printable((str(error).splitlines() or [type(error).__name__])[0])
