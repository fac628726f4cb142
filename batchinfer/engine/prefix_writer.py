"""Enters what sequences compute into the prefix index: prompts at once, outputs when they pause."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.prefix_index import Block
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.table import Rows, SequenceTable


class PrefixWriter:
    """Other rows share a prompt's blocks; an output's are found again by the row itself alone.

    So a block of a prompt is entered when the step that fills it is scheduled, and those of an
    output only when its sequence is preempted: steady decode enters nothing.

    Args:
        pool: the KV pool's blocks.
        table: the running sequences.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable) -> None:
        self._pool = pool
        self._table = table
        self.prefilling: dict[Block, list[Sequence]] = {}
        """Rows whose prompts this step leaves unfinished, by the last block they entered."""

    def begin_step(self) -> None:
        """Another step is being scheduled."""
        self.prefilling = {}

    def enter_prompts(self, rows: Rows, num_new: npt.NDArray[np.integer]) -> None:
        """Enter blocks of prompts that this step fills, and the part of one a prompt ends in."""
        start, prompt = self._table.num_computed[rows], self._table.num_prompt[rows]
        for at in np.flatnonzero(start < prompt):
            end = int(start[at] + num_new[at])
            self._enter_prompt(self._table.sequence(rows[at]), end, int(prompt[at]))

    def enter_computed(self, sequence: Sequence) -> list[Block]:
        """Enter all that a running sequence computed, the block it ends in as far as it goes.

        Returns:
            The indexed blocks that hold it.
        """
        computed, size = int(self._table.num_computed[sequence.row]), self._pool.block_size
        parent, entries = self._pool.entry_below([], sequence.request.adapter), list[Block]()
        for block, start in zip(sequence.blocks, range(0, computed, size), strict=True):
            if parent is None:
                break
            key = sequence.key(start, min(start + size, computed))
            parent = self._pool.enter(parent, block, key)
            if parent is not None:
                self._pool.settle_block(parent)
                entries.append(parent)
        return entries

    def _enter_prompt(self, sequence: Sequence, end: int, prompt: int) -> None:
        size = self._pool.block_size
        self._enter_blocks(sequence, min(end, prompt) // size)
        parent = sequence.index_parent
        if parent is None:
            return
        if end < prompt:
            self.prefilling.setdefault(parent, []).append(sequence)
        elif prompt % size and end // size == prompt // size:
            key = sequence.key(prompt - prompt % size, prompt)
            self._pool.enter(parent, sequence.blocks[prompt // size], key)

    def _enter_blocks(self, sequence: Sequence, stop: int) -> None:
        """Enter a sequence's blocks up to ``stop``."""
        size = self._pool.block_size
        while sequence.index_parent is not None and sequence.num_indexed < stop:
            at = sequence.num_indexed
            key = sequence.key(at * size, (at + 1) * size)
            block = sequence.blocks[at]
            sequence.index_parent = self._pool.enter(sequence.index_parent, block, key)
            sequence.num_indexed += 1
