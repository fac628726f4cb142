"""The blocks that running sequences are given as they grow."""

from __future__ import annotations

from collections import Counter

import numpy as np

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.prefix_index import Block
from batchinfer.engine.table import Int, Rows, SequenceTable


class Growth:
    """Says which blocks new tokens need, and hands them out.

    Args:
        pool: the KV pool's blocks.
        table: the running sequences.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable) -> None:
        self._pool = pool
        self._table = table

    def blocks_wanted(self, rows: Rows, num_new: Int) -> Int:
        """[S] blocks each row must be given: for new tokens, and to copy a shared last block."""
        table = self._table
        end = table.num_computed[rows] + num_new
        wanted: Int = -(-end // table.block_size) - table.num_blocks[rows]
        copies: Counter[Block] = Counter()
        for at in np.flatnonzero(table.tail_shared[rows]):
            last = table.sequence(rows[at]).blocks[-1]
            if self._must_copy_tail(int(rows[at])) and copies[last] < last.ref_count - 1:
                copies[last] += 1  # the last one to refer to it writes to it
                wanted[at] += 1
        return wanted

    def extend(self, row: int, num_new: int) -> None:
        """Give a row its own last block and the blocks its new tokens need."""
        table, pool = self._table, self._pool
        if table.tail_shared[row]:
            if self._must_copy_tail(row):  # copy-on-write
                own = pool.allocate()
                shared = table.replace_last_block(row, own)
                pool.copy(shared, own)
                pool.release([shared])
            table.tail_shared[row] = False
        end = int(table.num_computed[row]) + num_new
        for _ in range(-(-end // table.block_size) - int(table.num_blocks[row])):
            table.append_block(row, pool.allocate())

    def _must_copy_tail(self, row: int) -> bool:
        """Whether the row's next token goes into a block that others refer to as well."""
        table = self._table
        partly_filled = table.num_computed[row] % table.block_size != 0
        return bool(partly_filled) and table.sequence(row).blocks[-1].ref_count > 1
