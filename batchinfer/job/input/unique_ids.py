"""A check of the id column: no value is missing, none comes twice."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchinfer.console.format import format_value, printable
from batchinfer.errors import DataError
from batchinfer.job.input.arrow_text import python_values
from batchinfer.job.input.dataset import Source

_REMEDY = "; give every row a text or a number, or name another column"
HASHES_AT_ONCE = 1 << 24
"""Hashes held at a time (8 bytes each); a longer dataset is read once for each so many rows."""


def check_unique_ids(source: Source, column: str) -> None:
    """Check that ``column`` holds a different value in every selected row.

    Sorts 64-bit hashes of the values, then compares the few values whose hashes are equal.

    Raises:
        DataError: naming a row without a value, or a value and the rows that share it.
    """
    passes = -(-source.num_rows // HASHES_AT_ONCE)
    for part in range(passes):
        hashes = np.fromiter(
            (h for _, value in _values(source, column) if (h := hash(value)) % passes == part),
            dtype=np.int64,
        )
        repeated = _repeated(hashes)
        if repeated:
            _refuse_equal_values(source, column, repeated)


def _values(source: Source, column: str) -> Iterator[tuple[int, Hashable]]:
    for first_row, batch in source.scan([column], [source.rows_there]):
        for row, value in enumerate(python_values(batch.column(0)), first_row):
            if value is None or value != value:  # NaN is the one value that is not itself
                raise DataError(
                    f"input.id_column: row {row} has no {format_value(column)}{_REMEDY}"
                )
            if not isinstance(value, Hashable):
                kind = batch.schema.types[0]
                raise DataError(
                    f"input.id_column: {format_value(column)} is a {kind} column{_REMEDY}"
                )
            yield row, value


def _repeated(hashes: npt.NDArray[np.int64]) -> set[int]:
    hashes.sort()
    return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())


def _refuse_equal_values(source: Source, column: str, hashes: set[int]) -> None:
    rows_of: dict[Hashable, list[int]] = {}
    for row, value in _values(source, column):
        if hash(value) in hashes:
            rows_of.setdefault(value, []).append(row)
    for value, rows in rows_of.items():
        if len(rows) > 1:
            text = printable(_shown(value, source.schema.field(column).type), 60)
            raise DataError(
                f"input.id_column: {format_value(column)} holds {text} twice, in rows "
                f"{rows[0]} and {rows[1]}",
                hint="ids must be unique; drop the duplicates or name another column",
            )


def _shown(value: Hashable, kind: pa.DataType) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, int) and pa.types.is_temporal(kind):
        return str(pa.array([value], kind).cast(pa.string())[0])
    return str(value)
