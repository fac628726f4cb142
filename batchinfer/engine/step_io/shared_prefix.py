"""Finds shared prefixes of a step's sequences, whose blocks attention reads only once.

Sequences that share blocks, such as rows with a common prompt or samples of a row, form a tree. If
the leaves of every branch are adjacent, one number per sequence describes the tree: the length of
the prefix shared with the previous sequence. (This is the LCP array of a suffix array, Manber &
Myers 1990.)
"""

from __future__ import annotations

import numpy as np

from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.step import Int32, SharedPrefixes

MIN_SHARED_TOKENS = 64
"""Minimum length of a shared prefix, in tokens: the CPU kernel's tile size. On a CPU, sharing 64 of
128 tokens gained nothing, and sharing 512 of 576 tokens gave 1.9 times the speed."""


class PrefixTree:
    """Finds the shared prefixes of each step. The previous order is reused while block tables only
    grow."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._version = -1
        self._rows: Rows = np.empty(0, dtype=np.intp)
        self._order: Int32 = np.empty(0, dtype=np.int32)
        self._shared_blocks: Int32 = np.empty(0, dtype=np.int32)

    def of_step(self, rows: Rows) -> SharedPrefixes | None:
        """Return the prefixes that table rows ``rows`` [S] share; None if no prefix is shared."""
        table, size = self._table, self._table.block_size
        if not table.windows:  # no layer attends
            return None
        if self._version != table.version or not np.array_equal(rows, self._rows):
            self._version, self._rows = table.version, rows
            self._order, self._shared_blocks = order_by_blocks(
                table.block_ids[rows], table.num_blocks[rows]
            )
        if not self._shared_blocks.any():
            return None
        computed = table.num_computed[rows][self._order] // size * size
        shared = np.minimum(self._shared_blocks * np.int32(size), computed)
        shared[1:] = np.minimum(shared[1:], computed[:-1])
        shared[shared < MIN_SHARED_TOKENS] = 0
        return SharedPrefixes(self._order, shared) if shared.any() else None


def order_by_blocks(tables: Int, num_blocks: Int32) -> tuple[Int32, Int32]:
    """Return an order in which sequences with a common prefix are adjacent.

    Args:
        tables: [S, longest table] ids of blocks; undefined past a sequence's last block.
        num_blocks: [S] number of blocks of each sequence.

    Returns:
        [S] the order, and [S] the number of leading blocks shared with the previous sequence in the
        order, 0 for the first. Sequences without shared blocks come last, in their original order.
    """
    num_sequences = len(tables)
    shared = np.zeros(num_sequences, dtype=np.int32)
    _, inverse, counts = np.unique(tables[:, 0], return_inverse=True, return_counts=True)
    begins_alike = counts[inverse] > 1
    chosen = np.flatnonzero(begins_alike)
    alone = np.flatnonzero(~begins_alike)
    if len(chosen):
        width = int(num_blocks[chosen].max())
        past_end = np.arange(width) >= num_blocks[chosen, None]
        # Pad with -1, because 0 is a slot.
        keys = np.where(past_end, tables.dtype.type(-1), tables[chosen, :width])
        by_key = np.argsort(keys.view(np.dtype((np.void, keys.itemsize * width)))[:, 0])
        chosen, keys = chosen[by_key], keys[by_key]
        differ = keys[1:] != keys[:-1]
        common = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
        held = num_blocks[chosen]
        shared[1 : len(chosen)] = np.minimum(common, np.minimum(held[1:], held[:-1]))
    return np.concatenate([chosen, alone]).astype(np.int32), shared
