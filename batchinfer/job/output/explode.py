"""Converts tables with one row per input row to one row per sample (``output.explode``), and back.

Each sample of an input row gets its own output row. An exploded row has one sample in ``outputs``,
and the sample's text, reasoning, tool calls and token counts in their columns; all other values are
repeated. A failed row, which has no samples, stays as it is. The metadata of a part says whether
the part is exploded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

METADATA = "batchinfer.explode"
_PIECE_BYTES = 1 << 30
"""Maximum number of bytes to repeat at a time, because an Arrow array holds up to 2 GiB of text."""


def is_exploded(table: pa.Table) -> bool:
    """Return True if a part's table has a row for each sample."""
    return METADATA.encode() in (table.schema.metadata or {})


def first_of_rows(table: pa.Table) -> pa.Table:
    """Return the first output row of each input row of a part's table, exploded or not."""
    if not is_exploded(table) or not table.num_rows:
        return table
    # Filter instead of ``take``, which would join all chunks.
    return table.filter(pa.array(_begins(table["row_id"].to_numpy())))


def exploded(table: pa.Table) -> pa.Table:
    """Return a table with a row for each sample of ``table``, which holds finished rows."""
    outputs = _array(table["outputs"])
    lengths = pc.list_value_length(outputs).to_numpy(zero_copy_only=False)
    repeats = np.maximum(lengths, 1)
    has_sample = np.repeat(lengths > 0, repeats)
    samples = pc.list_flatten(outputs)
    at = np.cumsum(has_sample) - 1
    sample_of = pa.array(at, mask=~has_sample)
    rows = _repeated(table, repeats)
    ok = pc.equal(_array(rows["status"]), "ok")
    texts = pc.struct_field(samples, "text").take(sample_of)
    tokens = pc.struct_field(samples, "num_tokens").take(sample_of)
    changed = {
        "outputs": pa.ListArray.from_arrays(_offsets(has_sample), samples),
        "generated_text": pc.if_else(ok, texts, pa.scalar(None, pa.string())),
        "num_output_tokens": pc.fill_null(tokens, 0),
    }
    if "reasoning" in table.schema.names:
        thoughts = pc.struct_field(samples, "reasoning").take(sample_of)
        changed["reasoning"] = pc.if_else(ok, thoughts, pa.scalar(None, pa.string()))
        counts = pc.struct_field(samples, "num_reasoning_tokens").take(sample_of)
        changed["num_reasoning_tokens"] = pc.fill_null(counts, 0)
    if "tool_calls" in table.schema.names:
        calls = pc.struct_field(samples, "tool_calls").take(sample_of)
        changed["tool_calls"] = pc.if_else(ok, calls, pa.scalar(None, calls.type))
    return _with(rows, changed)


def whole_rows(table: pa.Table) -> pa.Table:
    """Return a table with a row for each input row of a part's table, exploded or not."""
    if not is_exploded(table) or not table.num_rows:
        return table
    begins = np.flatnonzero(_begins(table["row_id"].to_numpy()))
    outputs = _array(table["outputs"])
    lengths = pc.list_value_length(outputs).to_numpy(zero_copy_only=False)
    counts = np.add.reduceat(lengths, begins)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    changed = {"outputs": pa.ListArray.from_arrays(offsets, pc.list_flatten(outputs))}
    for name in ("num_output_tokens", "num_reasoning_tokens"):
        if name in table.schema.names:
            tokens = _array(table[name]).to_numpy()
            changed[name] = pa.array(np.add.reduceat(tokens, begins), pa.int32())
    return _with(first_of_rows(table), changed)


def _repeated(table: pa.Table, repeats: npt.NDArray[np.integer]) -> pa.Table:
    """Return a table with each row repeated; ``repeats``, int [rows], holds the counts."""
    pieces, start = list[pa.RecordBatch](), 0
    for batch in table.to_batches():
        pieces += _pieces(batch, repeats[start : start + batch.num_rows])
        start += batch.num_rows
    return pa.Table.from_batches(pieces, table.schema)


def _pieces(batch: pa.RecordBatch, repeats: npt.NDArray[np.integer]) -> Iterator[pa.RecordBatch]:
    most = int(repeats.max(initial=0))
    if batch.nbytes * most <= _PIECE_BYTES:
        yield batch.take(pa.array(np.repeat(np.arange(batch.num_rows), repeats)))
    elif batch.num_rows > 1:
        middle = batch.num_rows // 2
        yield from _pieces(batch[:middle], repeats[:middle])
        yield from _pieces(batch[middle:], repeats[middle:])
    else:
        at_once = max(1, _PIECE_BYTES // batch.nbytes)
        for done in range(0, most, at_once):
            yield batch.take(pa.array(np.zeros(min(at_once, most - done), dtype=np.int64)))


def _begins(row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a mask, bool [rows], of the first output row of each input row."""
    return np.concatenate([[True], row_ids[1:] != row_ids[:-1]])


def _offsets(has_sample: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(has_sample)]).astype(np.int32)


def _with(table: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    arrays = [columns.get(name, table[name]) for name in table.schema.names]
    return pa.table(
        [a.cast(f.type) for a, f in zip(arrays, table.schema, strict=True)], schema=table.schema
    )


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks()
