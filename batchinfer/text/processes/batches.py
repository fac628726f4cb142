"""Splits rows into batches of pickles, which are so small that workers share the work evenly."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from batchinfer.errors import RowError
from batchinfer.text.processes.worker import Result
from batchinfer.text.row_values import MAX_ROW_BYTES, require_size

_MIN_ROWS, _MAX_ROWS = 8, 256
_MAX_BYTES = 1 << 17


@dataclass
class Batch:
    """Rows for one message to a worker."""

    indices: list[int] = field(default_factory=list)
    """Indices of the rows in the call."""
    rows: list[bytes] = field(default_factory=list)
    """The rows, each pickled separately."""
    num_bytes: int = 0


def make_batches(
    rows: Sequence[Mapping[str, object]], results: list[Result | None], num_batches: int
) -> Iterator[Batch]:
    """Split rows into about ``num_batches`` batches of at most 256 rows and 128 KiB.

    A row that cannot be sent is in no batch; its error is stored in ``results`` at its index.
    """
    most_rows = min(max(_MIN_ROWS, -(-len(rows) // num_batches)), _MAX_ROWS)
    batch = Batch()
    for index, row in enumerate(rows):
        try:
            data = _pickled(row)
        except RowError as error:
            results[index] = error
            continue
        is_full = len(batch.rows) == most_rows or batch.num_bytes + len(data) > _MAX_BYTES
        if batch.rows and is_full:
            yield batch
            batch = Batch()
        batch.indices.append(index)
        batch.rows.append(data)
        batch.num_bytes += len(data)
    if batch.rows:
        yield batch


def _pickled(row: Mapping[str, object]) -> bytes:
    for name, value in row.items():
        require_size(value, name)
    try:
        data = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
    except (RecursionError, pickle.PicklingError, TypeError, AttributeError) as error:
        reason = f"a value that cannot be sent to another process: {error}"
        raise RowError("unsupported_content", reason) from error
    if len(data) > MAX_ROW_BYTES:
        raise RowError("row_too_large", f"its columns hold over {MAX_ROW_BYTES} bytes")
    return data
