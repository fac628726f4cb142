"""The base class of text formats: reads UTF-8 files, plain or compressed, in batches of records."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
from batchinfer.job.storage.reader import store_of

MARK = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, which some editors write at the beginning of a file."""
_CHUNK = 1 << 20
_MOST_BYTES = 64 << 20
"""A batch ends once its records have this total size in bytes."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
"""First bytes of compressed files; text files do not begin with them."""
_MARKS = {
    b"\xff\xfe\0\0": "UTF-32LE",
    b"\0\0\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}
_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}
"""Encodings of files, keyed by whether each of the first four bytes is zero. This works for files
that begin with ASCII (RFC 4627).
"""
_CHECKED_LINES = 100
_GOOD_PER_BAD = 10
"""A file is refused if none of its non-ASCII lines is valid UTF-8 and more than one in this many
lines is such a line.
"""

Record = TypeVar("Record")


class TextFormat(Format, Generic[Record]):
    """A text format with one record per row."""

    title: str
    """The format's name in messages."""

    @abstractmethod
    def records(self, chunks: Iterable[bytes], path: str) -> Iterator[list[Record]]:
        """Split a file's content into batches of records."""

    @abstractmethod
    def parsed(self, records: list[Record], path: str) -> list[Any]:
        """Parse records; an invalid record becomes a ``RowError``."""

    def read_whole(self, path: str, learn: Callable[[list[Any]], None]) -> InputFile:
        """Read a whole file to count its rows and hash it.

        Args:
            learn: called with the parsed records of each batch.

        Raises:
            DataError: the file cannot be read, or all of its records are invalid.
        """
        digest = hashlib.sha256()
        num_rows = num_good = 0
        problem: RowError | None = None
        with read_errors(path):
            stat = store_of(path).stat(path)
            with opened(path) as chunks:
                for records in self.records(_checked(chunks, path, digest.update), path):
                    rows = self.parsed(records, path)
                    learn(rows)
                    bad = [row for row in rows if isinstance(row, RowError)]
                    num_rows, num_good = num_rows + len(rows), num_good + len(rows) - len(bad)
                    problem = problem or next(iter(bad), None)
        if problem is not None and not num_good:
            raise DataError(f"{path} is not valid {self.title}: {problem.message}", hint=REWRITE)
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
                for records in self.records(chunks, file.path):
                    yield from cut(records, row, wanted)
                    row += len(records)
                    if not wanted or wanted[0].start >= stop:
                        return
            if row < stop:
                raise OSError("it has fewer lines than before")


@contextmanager
def opened(path: str) -> Iterator[Iterator[bytes]]:
    """Open a file and iterate over its decompressed content in chunks.

    Raises:
        OSError: the file cannot be read.
    """
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
    """Turn errors from reading a file into a DataError that names it."""
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


def is_utf8(text: bytes) -> bool:
    """Return True if the bytes are valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def refuse_8_bit(path: str) -> DataError:
    """Make the error for a file in an 8-bit encoding."""
    return _refuse_encoding(path, "WINDOWS-1252", "Latin-1 or Windows-1252")


def _refuse_encoding(path: str, iconv_name: str, name: str) -> DataError:
    return DataError(
        f"{path} seems to be encoded in {name}; it must be UTF-8",
        hint=f"convert it with iconv -f {iconv_name} -t UTF-8 OLD > NEW (decompress it "
        "first if it is compressed)",
    )


def _checked(
    chunks: Iterable[bytes], path: str, update: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Pass each chunk of a file to ``update``, then yield it; check the first chunk for UTF-8."""
    for number, chunk in enumerate(chunks):
        if number == 0:
            _check_encoding(chunk, path)
        update(chunk)
        yield chunk


def _check_encoding(start: bytes, path: str) -> None:
    """Check that a file's beginning is UTF-8, except for a few invalid lines.

    Raises:
        DataError: the file has a different encoding, which the message names.
    """
    zeros = tuple(byte == 0 for byte in start[:4])
    encoding = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    encoding = encoding or _ZEROS.get(zeros)
    if encoding is not None:
        raise _refuse_encoding(path, encoding, encoding)
    lines = start.split(b"\n")
    if len(start) >= _CHUNK and len(lines) > 1:
        del lines[-1]  # drop the last line, because the chunk may end inside a character
    lines = [line for line in lines[:_CHECKED_LINES] if line and not line.isspace()]
    marked = [line for line in lines if not line.isascii()]
    if len(marked) > max(1, len(lines) // _GOOD_PER_BAD) and not any(map(is_utf8, marked)):
        raise refuse_8_bit(path)
