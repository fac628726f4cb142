"""Detects how to read text files: the delimiter of CSV, and the key of the list in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from batchinfer.errors import DataError, RowError
from batchinfer.job.input.discover import find_files, named_format
from batchinfer.job.input.formats.csv import DELIMITERS, default_delimiter, read_records
from batchinfer.job.input.formats.encoding import KEEP_BYTES, to_utf8
from batchinfer.job.input.formats.json import lists_of_objects
from batchinfer.job.input.formats.options import TextOptions
from batchinfer.job.input.formats.table import table_format
from batchinfer.job.input.formats.text_file import opened, read_errors

_RECORDS = 200


def detect_text_options(data: str, encoding: str) -> TextOptions:
    """Detect from a dataset's first file how to read the dataset.

    Args:
        data: as for ``input.path``.
        encoding: Python's name of the files' encoding.

    Raises:
        DataError: no file was found, or the file cannot be read.
    """
    options = TextOptions(encoding)
    if table_format([data], "auto") is not None:
        return options
    files = find_files(data)
    kind = named_format(files)
    if kind == "csv":
        return replace(options, delimiter=_delimiter(files[0], encoding))
    if kind == "json" and (lists := lists_of_objects(files[0], options)):
        return replace(options, json_field=max(lists, key=lists.__getitem__))
    return options


def _delimiter(path: str, encoding: str) -> str | None:
    """Return the delimiter of a CSV file; None for the default delimiter.

    Only delimiters that occur in the header are considered. The best delimiter is the one for which
    the fewest records differ from the header in their number of cells. In a tie, the delimiter that
    gives the most columns wins.
    """
    usual = default_delimiter(path)
    with read_errors(path), opened(path) as chunks:
        start = next(to_utf8(chunks, encoding, KEEP_BYTES), b"")
    delimiters = sorted(DELIMITERS, key=lambda mark: mark != usual)
    counts = {mark: _cells_of_records(start, path, mark) for mark in delimiters}
    possible = [mark for mark, cells in counts.items() if cells and cells[0] > 1]
    best = min(possible, key=lambda mark: _misfit(counts[mark]), default=usual)
    return None if best == usual else best


def _cells_of_records(start: bytes, path: str, delimiter: str) -> list[int]:
    """Count the cells of the header and of the first records; 0 for an invalid record."""
    cells: list[int] = []
    with suppress(DataError):  # a quote is still open at the end of the chunk
        for _, record in islice(read_records([start], path, delimiter), _RECORDS):
            cells.append(0 if isinstance(record, RowError) else len(record))
    return cells


def _misfit(cells: Sequence[int]) -> tuple[int, int]:
    header, *rows = cells
    return sum(count != header for count in rows), -header
