"""The index of row keys finds the same rows as a dict."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.job.reuse.reuse import NOT_FOUND, KeyIndex
from batchinfer.job.rows.row_key import KEYS_SCHEMA

# Keys consist of a few different halves, so that many keys share a half. Some bytes sort
# differently as signed and as unsigned numbers.
HALVES = st.sampled_from([bytes(8), b"\0" * 7 + b"\1", b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7)])
KEYS = st.builds(bytes.__add__, HALVES, HALVES) | st.binary(min_size=16, max_size=16)


def table(rows: list[tuple[int, bytes]], cut: int = 0) -> pa.Table:
    """Return the rows as a table of two chunks, each with an offset into its buffers."""
    whole = pa.table([[row_id for row_id, _ in rows], [key for _, key in rows]], schema=KEYS_SCHEMA)
    return pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])


@given(
    files=st.lists(st.lists(KEYS, max_size=6), max_size=4),
    others=st.lists(st.none() | KEYS, max_size=6),
    cut=st.integers(0, 6),
)
def test_the_index_finds_the_same_as_a_dict(
    files: list[list[bytes]], others: list[bytes | None], cut: int
) -> None:
    known: dict[bytes, tuple[int, int]] = {}
    for file, keys in enumerate(files):
        for row, key in enumerate(keys):
            known.setdefault(key, (file, 100 * file + row))
    tables = [
        table([(100 * file + row, key) for row, key in enumerate(keys)], min(cut, len(keys)))
        for file, keys in enumerate(files)
    ]
    index = KeyIndex(tables)
    assert len(index) == len(known)
    asked = [*others, *known]
    found, rows = index.find(asked)
    for key, file, row in zip(asked, found.tolist(), rows.tolist(), strict=True):
        if key is None or key not in known:
            assert file == NOT_FOUND
        else:
            assert (file, row) == known[key]
