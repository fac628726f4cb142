"""Files of text as input: decompressed, in UTF-8, in batches of records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pyarrow as pa

from batchinfer.console.format import first_line
from batchinfer.errors import DataError
from batchinfer.job.input.format import (
    BATCH_ROWS,
    MEND,
    READ_ERRORS,
    ReadRequest,
    check_unchanged,
    cut,
)
from batchinfer.job.storage.reader import store_of

MARK = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, which some editors put first."""
_CHUNK = 1 << 20
_MOST_BYTES = 64 << 20
"""Of records that are read at a time."""
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
"""How compressed files begin; no line of text does."""
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
"""Which of the first four bytes are zero where two characters of ASCII come first (RFC 4627, 3)."""
_LOOKED_AT = 100
_MOST_GOOD = 10
"""Lines for one that is not UTF-8, where a few bad ones are all that is not ASCII."""

Record = TypeVar("Record")


@contextmanager
def opened(path: str) -> Iterator[Iterator[bytes]]:
    """The content of a file in chunks, decompressed.

    Raises:
        OSError: it cannot be read.
    """
    with store_of(path).open(path) as file:
        start = file.read(max(map(len, _PACKED)))
        file.seek(0)
        packed = next((name for mark, name in _PACKED.items() if start.startswith(mark)), None)
        if packed is None:
            yield iter(lambda: file.read(_CHUNK), b"")
        else:
            with pa.CompressedInputStream(file, packed) as unpacked:
                yield iter(lambda: unpacked.read(_CHUNK), b"")


def looked_at(
    chunks: Iterable[bytes], path: str, update: Callable[[bytes], None]
) -> Iterator[bytes]:
    """Pass on the chunks of a file that is read for the first time.

    Args:
        update: takes every chunk: a hash's.

    Raises:
        DataError: it is in another encoding than UTF-8.
    """
    for number, chunk in enumerate(chunks):
        if number == 0:
            _check_encoding(chunk, path)
        update(chunk)
        yield chunk


def refuse_encoding(path: str, encoding: str, name: str | None = None) -> DataError:
    """Why a file in another encoding cannot be read, and what to do about it.

    Args:
        encoding: as ``iconv`` calls it.
        name: as people call it.
    """
    return DataError(
        f"{path} is in {name or encoding}, or so it looks; it must be UTF-8",
        hint=f"convert it: iconv -f {encoding} -t UTF-8 OLD > NEW (of what is in it, if it is "
        "compressed)",
    )


def refuse_8_bit(path: str) -> DataError:
    """As ``refuse_encoding``, where bytes above ASCII are no UTF-8."""
    return refuse_encoding(path, "WINDOWS-1252", "Latin-1 or Windows-1252")


def _check_encoding(start: bytes, path: str) -> None:
    """Check that a file's beginning is UTF-8, but for a few lines.

    Raises:
        DataError: naming file and encoding.
    """
    zeros = tuple(byte == 0 for byte in start[:4])
    found = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    found = found or _ZEROS.get(zeros)
    if found is not None:
        raise refuse_encoding(path, found)
    lines = start.split(b"\n")
    if len(start) >= _CHUNK and len(lines) > 1:
        del lines[-1]  # which may be cut within a character
    lines = [line for line in lines[:_LOOKED_AT] if line and not line.isspace()]
    marked = [line for line in lines if not line.isascii()]
    if len(marked) > max(1, len(lines) // _MOST_GOOD) and not any(map(is_utf8, marked)):
        raise refuse_8_bit(path)


def is_utf8(text: bytes) -> bool:
    """Whether bytes are text in UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def batched(
    records: Iterable[Record], num_bytes: Callable[[Record], int]
) -> Iterator[list[Record]]:
    """Records in batches: of at most ``BATCH_ROWS``, and of few where they are large."""
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


def wanted_records(
    request: ReadRequest, batches: Callable[[Iterable[bytes]], Iterator[list[Record]]]
) -> Iterator[tuple[int, list[Record]]]:
    """Records of the rows wanted, in runs, each with its first row's id.

    Args:
        batches: makes records of a file's content.

    Raises:
        DataError: the file cannot be read, or is no longer the one that was planned.
    """
    file, wanted, row = request.file, request.wanted, request.first_row
    stop = row + file.num_rows
    with read_errors(file.path):
        check_unchanged(file)
        with opened(file.path) as chunks:
            for records in batches(chunks):
                length = len(records)
                yield from cut(records, length, row, wanted, lambda of, at, n: of[at : at + n])
                row += length
                if not wanted or wanted[0].start >= stop:
                    return
        if row < stop:
            raise OSError("it has fewer lines than before")


@contextmanager
def read_errors(path: str) -> Iterator[None]:
    """Errors of reading a file as a DataError that names it."""
    try:
        yield
    except READ_ERRORS as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}", hint=MEND) from error
