"""Reads Arrow IPC files, including Feather version 2, and Arrow IPC streams.

A record batch is read as a whole, but only with the requested columns. A reader therefore needs
enough memory for the requested columns of the largest batch. Offsets and indices are checked before
values are read, because pyarrow does not check them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.input.arrow_types import as_bytes, with_leaves
from batchinfer.job.input.format import (
    BATCH_ROWS,
    READ_ERRORS,
    REWRITE,
    Format,
    InputFile,
    ReadRequest,
    check_unchanged,
    cut,
)
from batchinfer.job.input.parquet import shape_of
from batchinfer.job.storage.reader import store_of

_MAGIC = b"ARROW1"
_FEATHER_1 = b"FEA1"
_CHUNK = 1 << 20


class ArrowFormat(Format):
    has_unchecked_text = True

    def __init__(self) -> None:
        self._lengths: dict[str, list[int]] = {}
        """Number of rows in each record batch, keyed by the file's path."""

    def inspect(self, path: str) -> tuple[InputFile, pa.Schema]:
        digest = hashlib.sha256()
        try:
            store = store_of(path)
            stat = store.stat(path)
            with store.open(path) as file:
                _check_kind(file, path)
                schema = _reader(file).schema
                shape_of(pa.struct(list(schema)))  # raises if a name is not UTF-8
                self._lengths[path] = [len(batch) for batch in _all_batches(file, schema)]
                file.seek(0)
                for chunk in iter(lambda: file.read(_CHUNK), b""):
                    digest.update(chunk)
        except (*READ_ERRORS, ValueError) as error:
            raise DataError(
                f"{path} cannot be read as Arrow IPC: {first_line(error)}", hint=REWRITE
            ) from error
        num_rows = sum(self._lengths[path])
        return InputFile.of(path, stat, num_rows, *[digest.hexdigest()] * 2), schema

    def scan(self, request: ReadRequest) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Read batches of columns; a DataError names the record batch that cannot be read."""
        file, wanted, row, number = request.file, request.wanted, request.first_row, 0
        try:
            check_unchanged(file)
            with store_of(file.path).open(file.path) as opened:
                batches = _Batches(opened, request.columns)
                for number, length in enumerate(self._lengths[file.path]):
                    if not wanted:
                        return
                    if wanted[0].start < row + length:
                        batch = batches.read(number)
                        if len(batch) != length:
                            raise ValueError(f"it has {len(batch)} rows instead of {length}")
                        for at in range(batch.num_columns):
                            check_buffers(batch.column(at))
                        for at in range(0, length, BATCH_ROWS):
                            yield from cut(batch.slice(at, BATCH_ROWS), row + at, wanted)
                        del batch
                    row += length
        except (*READ_ERRORS, ValueError, IndexError) as error:
            raise DataError(
                f"{file.path}: record batch {number} cannot be read: {first_line(error)}",
                hint=f"the file is damaged or has changed; {REWRITE}",
            ) from error


class _Batches:
    """Reads some columns of record batches, which must be read in ascending order."""

    def __init__(self, file: pa.NativeFile, columns: Sequence[str]) -> None:
        names = _reader(file).schema.names
        self._columns = columns
        self._reader = _reader(file, [names.index(name) for name in columns])
        self._next = 0

    def read(self, number: int) -> pa.RecordBatch:
        """Read a batch by its number; in a stream, skip the batches before it."""
        if hasattr(self._reader, "get_batch"):
            return self._reader.get_batch(number).select(self._columns)
        for _ in range(self._next, number):
            self._reader.read_next_batch()
        self._next = number + 1
        return self._reader.read_next_batch().select(self._columns)


def _check_kind(file: pa.NativeFile, path: str) -> None:
    start = file.read(len(_MAGIC))
    if start.startswith(_FEATHER_1):
        raise DataError(
            f"{path} is Feather version 1",
            hint="write it again as version 2, for example with pyarrow.feather.write_feather",
        )
    if not start:
        raise DataError(f"{path} is empty (0 bytes), not an Arrow IPC file; {REWRITE}")


def _reader(
    file: pa.NativeFile, fields: Sequence[int] = ()
) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    """Open a file from its beginning; read all columns if ``fields`` is empty."""
    file.seek(0)
    is_file = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=list(fields), use_threads=False)
    make = pa.ipc.open_file if is_file else pa.ipc.open_stream
    return make(file, options=options)


def _all_batches(file: pa.NativeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read all record batches, but only their narrowest column."""
    sizes = [kind.bit_width if pa.types.is_primitive(kind) else 1 << 20 for kind in schema.types]
    reader = _reader(file, sorted(range(len(sizes)), key=sizes.__getitem__)[:1])
    if hasattr(reader, "get_batch"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def check_buffers(column: pa.Array) -> None:
    """Check that a column's offsets and indices are in range; strings may be invalid UTF-8.

    Raises:
        pyarrow.ArrowInvalid: an offset or index is out of range.
    """
    column.validate()
    column.view(with_leaves(column.type, as_bytes)).validate(full=True)
