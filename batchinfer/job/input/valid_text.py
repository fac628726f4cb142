"""Checks that the text of Parquet and Arrow files, which pyarrow reads unchecked, is UTF-8."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import pyarrow as pa

from batchinfer.console.format import format_value
from batchinfer.console.phases import phase
from batchinfer.errors import DataError
from batchinfer.job.input.arrow_types import without_text
from batchinfer.job.input.dataset import Source
from batchinfer.job.input.invalid_utf8 import (
    check_field_names,
    is_valid_text,
    python_values,
    with_valid_text,
)


def with_checked_text(source: Source, columns: Iterable[str]) -> Source:
    """Check the text in ``columns`` of the selected rows.

    Columns without text are not read, and neither are files of formats that check their text when
    they are opened.

    Returns:
            The dataset. With ``input.encoding_errors: replace``, each file has the number of cells
        that are not UTF-8.

    Raises:
        DataError: a cell is not UTF-8; the message names its file, row and column.
    """
    names = [name for name in columns if not without_text(source.schema.field(name).type)]
    if not (names and source.format.has_unchecked_text):
        return source
    starts = list(accumulate((file.num_rows for file in source.files), initial=0))
    counts = Counter[int]()
    with phase("checking texts", source.num_rows, "rows") as progress:
        for first_row, batch in source.scan(names, [source.rows_there]):
            for name, column in zip(names, batch.columns, strict=True):
                bad = _bad_rows(column, source.schema.field(name))
                if not bad:
                    continue
                at = bisect_right(starts, first_row) - 1
                if not source.format.replaces_bad_text:
                    row = first_row + bad[0] - starts[at]
                    raise _error(source.files[at].path, row, name)
                counts[at] += len(bad)
            progress.advance(len(batch))
    files = (replace(f, replaced_cells=counts[at]) for at, f in enumerate(source.files))
    return replace(source, files=tuple(files))


def _bad_rows(column: pa.Array, field: pa.Field) -> list[int]:
    """Return the indices of values that hold invalid UTF-8. Raise DataError if the column has such
    values and a struct with two fields of one name."""
    if is_valid_text(column):
        return []
    check_field_names(field)
    pairs = zip(python_values(column), python_values(with_valid_text(column)), strict=True)
    # Compare with ``repr``, because NaN is not equal to itself.
    return [at for at, (value, changed) in enumerate(pairs) if repr(value) != repr(changed)]


def _error(path: str, row: int, column: str) -> DataError:
    return DataError(
        f"{path}, row {row} (from 0), column {format_value(column)} is not valid UTF-8",
        hint="write the column again as UTF-8, or leave it out of input.keep_columns; to read such "
        "bytes as U+FFFD, set input.encoding_errors: replace",
    )
