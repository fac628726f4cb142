"""The base class of text formats: reads files, plain or compressed, in batches of records."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import DataError, RowError
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
from batchinfer.job.input.formats.encoding import (
    KEEP_BYTES,
    BadCell,
    check_start,
    to_utf8,
    wrong_encoding,
)
from batchinfer.job.input.formats.options import DEFAULT_OPTIONS, TextOptions
from batchinfer.job.storage.reader import store_of

_CHUNK = 1 << 20
_MOST_BYTES = 64 << 20
"""A batch ends once its records have this total size in bytes."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
"""First bytes of compressed files; text files do not begin with them."""

Record = TypeVar("Record")


class TextFormat(Format, Generic[Record]):
    title: str
    """The format's name in messages."""
    advice = REWRITE
    """Advice to the user about a file without a single valid record."""

    def __init__(self, options: TextOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self.errors: str = options.encoding_errors
        """``strict``, ``replace`` or ``KEEP_BYTES``."""

    @abstractmethod
    def records(self, chunks: Iterable[bytes], path: str) -> Iterator[list[Record]]:
        """Split a file's content, as UTF-8, into batches of records."""

    @abstractmethod
    def bad_cells(self, chunks: Iterable[bytes], path: str) -> Iterator[BadCell]:
        """Find the cells that are not valid UTF-8."""

    @abstractmethod
    def parsed(self, records: list[Record], path: str) -> list[Any]:
        """Parse records; an invalid record becomes a ``RowError``."""

    def read_whole(self, path: str, learn: Callable[[list[Any]], None]) -> InputFile:
        """Read a whole file to count its rows and hash it.

        Args:
            learn: called with the parsed records of each batch. If invalid bytes have to be
                replaced, the file is read again, and ``learn`` is called for all batches again.

        Raises:
            DataError: the file cannot be read or is not valid in its encoding, or all of its
                records are invalid.
        """
        with read_errors(path):
            try:
                return self._read_whole(
                    path, learn, "strict" if self.errors == "replace" else self.errors
                )
            except UnicodeDecodeError:
                with opened(path) as chunks:
                    bad = self.bad_cells(to_utf8(chunks, self.options.encoding, KEEP_BYTES), path)
                    if self.errors == "strict":
                        first = next(bad, None)
                        raise wrong_encoding(path, self.options.encoding, first) from None
                    count = sum(cell.column is not None for cell in bad)
                return replace(self._read_whole(path, learn, self.errors), replaced_cells=count)

    def _read_whole(self, path: str, learn: Callable[[list[Any]], None], errors: str) -> InputFile:
        digest = hashlib.sha256()
        num_rows = num_good = 0
        problem: RowError | None = None
        stat = store_of(path).stat(path)
        with opened(path) as chunks:
            checked = _checked(chunks, path, self.options.encoding, digest.update)
            for records in self.records(to_utf8(checked, self.options.encoding, errors), path):
                rows = self.parsed(records, path)
                learn(rows)
                bad = [row for row in rows if isinstance(row, RowError)]
                num_rows, num_good = num_rows + len(rows), num_good + len(rows) - len(bad)
                problem = problem or next(iter(bad), None)
        if problem is not None and not num_good:
            raise DataError(
                f"{path} is not valid {self.title}: {problem.message}", hint=self.advice
            )
        return InputFile.of(path, stat, num_rows, *[digest.hexdigest()] * 2)

    def wanted(self, request: ReadRequest) -> Iterator[tuple[int, list[Record]]]:
        """Yield runs of consecutive wanted records, each with the id of its first row.

        Raises:
            DataError: the file cannot be read, or has changed since the job was planned.
        """
        file, wanted, row = request.file, request.wanted, request.first_row
        stop = row + file.num_rows
        with read_errors(file.path):
            check_unchanged(file)
            with opened(file.path) as chunks:
                # ``read_whole`` has checked the encoding.
                errors = "replace" if self.errors == "replace" else KEEP_BYTES
                decoded = to_utf8(chunks, self.options.encoding, errors)
                for records in self.records(decoded, file.path):
                    yield from cut(records, row, wanted)
                    row += len(records)
                    if not wanted or wanted[0].start >= stop:
                        return
            if row < stop:
                raise OSError("it has fewer lines than before")


@contextmanager
def opened(path: str) -> Iterator[Iterator[bytes]]:
    """Open a file and iterate over its decompressed content in chunks."""
    with store_of(path).open(path) as file:
        start = file.read(max(map(len, _COMPRESSED)))
        file.seek(0)
        codec = next((name for mark, name in _COMPRESSED.items() if start.startswith(mark)), None)
        if codec is None:
            yield iter(lambda: file.read(_CHUNK), b"")
        else:
            with pa.CompressedInputStream(file, codec) as unpacked:
                yield iter(lambda: unpacked.read(_CHUNK), b"")


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Turn errors from reading a file into a DataError that names the file."""
    try:
        yield
    except READ_ERRORS as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}", hint=REWRITE) from error


def batched(
    records: Iterable[Record], num_bytes: Callable[[Record], int]
) -> Iterator[list[Record]]:
    """Group records into batches of at most ``BATCH_ROWS``; large records make smaller batches."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += num_bytes(record)
        if len(batch) == BATCH_ROWS or size >= _MOST_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked(
    chunks: Iterable[bytes], path: str, encoding: str, update: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Pass each chunk of a file to ``update``, then yield it; check the beginning of the file."""
    for number, chunk in enumerate(chunks):
        if number == 0:
            check_start(chunk, path, encoding)
        update(chunk)
        yield chunk
