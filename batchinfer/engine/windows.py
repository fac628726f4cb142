"""What leaves the windows of running sequences as they grow."""

from __future__ import annotations

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.table import Int, Rows, SequenceTable


class Windows:
    """Gives up the parts of blocks that no later token of a sequence sees.

    That is when a step is submitted. It reads them before a later one writes to their slots, as
    steps run in order (see ``Runner``).

    Args:
        pool: the KV pool's blocks.
        table: the running sequences.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable) -> None:
        self._pool = pool
        self._table = table

    def leave(self, rows: Rows, num_new: Int) -> None:
        """Give up what left a window by the tokens just submitted.

        Args:
            rows: [S] table rows.
            num_new: [S] tokens of each in the step; they count as computed.
        """
        table = self._table
        if not self._pool.parts.windows:
            return
        after = table.num_computed[rows]
        moved = (table.num_left(after) > table.num_left(after - num_new)).any(axis=0)
        for row in rows[moved]:
            sequence = table.sequence(row)
            if not self._is_waited_for(sequence):
                self._leave(sequence, self._pool.parts.left(int(table.num_computed[row])))

    def _leave(self, sequence: Sequence, left: tuple[int, ...]) -> None:
        sequence.state.note_peak_blocks()
        for part, (gone, now) in enumerate(zip(sequence.left, left, strict=True)):
            for block in sequence.blocks[gone:now]:
                self._pool.parts.leave(block.parts[part])
        sequence.left = left

    @staticmethod
    def _is_waited_for(sequence: Sequence) -> bool:
        """Whether others of its gang will fork from before where it is."""
        return any(other.row < 0 for other in sequence.gang)
