"""Shared prefixes of a step's sequences: blocks that attention reads once for several.

Sequences that share blocks form a tree: all below a common prompt, the samples of one row below
its prompt, and so on. Put in an order in which the leaves of every branch stand side by side, the
tree is said by one number a sequence: how much it shares with the one before it. (It is the array
of longest common prefixes of a suffix array, Manber & Myers 1990.)
"""

from __future__ import annotations

import numpy as np

from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.step import Int32, SharedPrefixes

MIN_SHARED_TOKENS = 64
"""Shorter prefixes are not shared. It is what the CPU's kernel takes at a time, and about where
sharing begins to pay there (measured: even at 64 shared tokens of 128, 1.9 times the speed at 512
of 576)."""


class PrefixTree:
    """Shared prefixes of one step after the other.

    Args:
        table: the running sequences.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._version = -1
        self._rows: Rows = np.empty(0, dtype=np.intp)
        self._order: Int32 = np.empty(0, dtype=np.int32)
        self._shared_blocks: Int32 = np.empty(0, dtype=np.int32)

    def of_step(self, rows: Rows) -> SharedPrefixes | None:
        """Prefixes that a step's sequences share, computed before it; None: there are none.

        Args:
            rows: [S] table rows of the step's sequences.
        """
        table, size = self._table, self._table.block_size
        if self._version != table.version or not np.array_equal(rows, self._rows):
            self._version, self._rows = table.version, rows
            self._order, self._shared_blocks = order_by_blocks(
                table.block_ids[rows], table.num_blocks[rows]
            )
        if not self._shared_blocks.any():
            return None
        whole = table.num_computed[rows][self._order] // size * size
        shared = np.minimum(self._shared_blocks * np.int32(size), whole)
        shared[1:] = np.minimum(shared[1:], whole[:-1])
        shared[shared < MIN_SHARED_TOKENS] = 0
        return SharedPrefixes(self._order, shared) if shared.any() else None


def order_by_blocks(tables: Int, num_blocks: Int32) -> tuple[Int32, Int32]:
    """An order of sequences in which those with a common prefix stand side by side.

    Args:
        tables: [S, longest table] numbers that tell blocks apart; anything past a sequence's last.
        num_blocks: [S] blocks of each.

    Returns:
        [S] the order, and [S] how many leading blocks each in it has in common with the one
        before it; 0 for the first. Sequences that share nothing stand last, as they stood.
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
        keys = np.where(past_end, tables.dtype.type(-1), tables[chosen, :width])  # 0 is a slot too
        by_key = np.argsort(keys.view(np.dtype((np.void, keys.itemsize * width)))[:, 0])
        chosen, keys = chosen[by_key], keys[by_key]
        differ = keys[1:] != keys[:-1]
        common = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
        held = num_blocks[chosen]
        shared[1 : len(chosen)] = np.minimum(common, np.minimum(held[1:], held[:-1]))
    return np.concatenate([chosen, alone]).astype(np.int32), shared
