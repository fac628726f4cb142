"""Lines of JSON as bytes, however long and damaged: split, and made into objects one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pydantic_core import from_json

from batchinfer.errors import RowError
from batchinfer.job.store import store_of

Line = tuple[int, bytes]
"""Its number in the file, from 1, and its bytes without the newline."""

MAX_LINE_BYTES = 64 << 20
"""A longer line is not read: as much as a row's longest text may take."""
_CHUNK = 1 << 20
_MARK = b"\xef\xbb\xbf"  # of UTF-8, which some editors put first
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
"""How compressed files begin; no line of JSON does."""
_KINDS: dict[type, str] = {
    **{str: "a string", list: "an array", type(None): "null"},
    **{bool: "true or false", int: "a number", float: "a number"},
}
_PLACE = re.compile(r" at line 1 column (\d+)$")


@contextmanager
def opened(path: str) -> Iterator[Iterator[bytes]]:
    """A file's content in chunks, decompressed.

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


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Lines that are not blank; of one that is too long, its beginning and a byte too many."""
    number, rest = 1, b""
    for chunk in chunks:
        start, *others = chunk.split(b"\n")
        rest = (rest + start)[: MAX_LINE_BYTES + 1]
        for line in others:
            if rest and not rest.isspace():
                yield number, rest.removeprefix(_MARK) if number == 1 else rest
            number, rest = number + 1, line
    if rest and not rest.isspace():
        yield number, rest.removeprefix(_MARK) if number == 1 else rest


def parse_object(line: Line, path: str) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        RowError: ``invalid_json``, ``invalid_utf8``, ``row_too_large``, naming file and line.
    """
    number, text = line
    where = f"{path}, line {number}"
    if len(text) > MAX_LINE_BYTES:
        raise RowError("row_too_large", f"{where} has over {MAX_LINE_BYTES} bytes")
    try:
        value = from_json(text, cache_strings="keys")
    except ValueError as error:
        reason = _PLACE.sub(r" at byte \1", str(error))
        code = "invalid_utf8" if reason.startswith("invalid unicode") else "invalid_json"
        raise RowError(code, f"{where} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        what = _KINDS[type(value)]
        raise RowError("invalid_json", f"{where} is {what}; it must be an object")
    return value
