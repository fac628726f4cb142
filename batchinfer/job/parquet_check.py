"""Reading a part back: whether its bytes are what they must be."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.job.explode import first_of_rows
from batchinfer.job.messages import printable
from batchinfer.job.row_ids import Part


def read_part(data: bytes, part: Part) -> pa.Table:
    """Decode all of a part, page checksums verified.

    Args:
        data: the Parquet file.
        part: which: it must hold its row ids in order; where it is exploded, each once or more.

    Raises:
        ValueError: what is wrong with it.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        table = file.read(use_threads=False)
        found = first_of_rows(table.select(["row_id"]))["row_id"].to_numpy()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ValueError(first_line(error)) from None
    if len(found) != part.num_rows:
        raise ValueError(f"it has {len(found):,} rows, not {part.num_rows:,}")
    known = np.concatenate([[part.rows.start - 1], found, [part.rows.stop]])
    if len(found) and not np.all(np.diff(known) > 0):
        raise ValueError("its rows are not the input's, in input order")
    return table


def first_line(error: BaseException) -> str:
    """An error of pyarrow's, on one line."""
    return printable((str(error).splitlines() or [type(error).__name__])[0])
