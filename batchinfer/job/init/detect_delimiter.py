"""Detects the delimiter of a CSV file from its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

from batchinfer.errors import DataError, RowError
from batchinfer.job.input.discover import find_files, named_format
from batchinfer.job.input.formats.csv import DELIMITERS, default_delimiter, read_records
from batchinfer.job.input.formats.encoding import KEEP_BYTES, TextOptions, to_utf8
from batchinfer.job.input.formats.table import table_format
from batchinfer.job.input.formats.text_file import opened, read_errors

_RECORDS = 200


def detect_delimiter(data: str, options: TextOptions) -> str | None:
    """Return the delimiter of the first CSV file of a dataset.

    Of the delimiters that the header has, this is the one with which the fewest records have a
    different number of cells than the header, and then the one with the most columns.

    Args:
        data: as for ``input.path``.

    Returns:
        None for the default delimiter, and for data that is not CSV.

    Raises:
        DataError: no file was found, or the file cannot be read.
    """
    if table_format([data], "auto") is not None:
        return None
    files = find_files(data)
    if named_format(files) != "csv":
        return None
    usual = default_delimiter(files[0])
    with read_errors(files[0]), opened(files[0]) as chunks:
        start = next(to_utf8(chunks, options.encoding, KEEP_BYTES), b"")
    delimiters = sorted(DELIMITERS, key=lambda mark: mark != usual)
    counts = {mark: _cells_of_records(start, files[0], mark) for mark in delimiters}
    possible = [mark for mark, cells in counts.items() if cells and cells[0] > 1]
    best = min(possible, key=lambda mark: _misfit(counts[mark]), default=usual)
    return None if best == usual else best


def _cells_of_records(start: bytes, path: str, delimiter: str) -> list[int]:
    """Count the cells of each of the first records, with the header; 0 for an invalid record."""
    cells: list[int] = []
    with suppress(DataError):  # a quote is still open at the end of the chunk
        for _, record in islice(read_records([start], path, delimiter), _RECORDS):
            cells.append(0 if isinstance(record, RowError) else len(record))
    return cells


def _misfit(cells: Sequence[int]) -> tuple[int, int]:
    header, *rows = cells
    return sum(count != header for count in rows), -header
