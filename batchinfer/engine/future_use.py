"""Which blocks have a known future use: that of a sequence that waits, or of a row to come.

Nothing is kept for it; it only orders eviction, and says what is worth a place on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.prefix_index import Block
from batchinfer.engine.sequence import Sequence


class FutureUse:
    """Tells blocks who will need them.

    Args:
        pool: the KV pool's blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._waiting: dict[Sequence, list[Block]] = {}
        """Waiting sequences, with the indexed blocks that they begin with."""
        self._num_swapped = 0
        self._counted_at = -1

    @property
    def num_swapped(self) -> int:
        """Waiting sequences that have blocks on the host only."""
        changes = self._pool.host.changes
        if self._counted_at != changes:
            self._counted_at = changes
            self._num_swapped = sum(
                any(block.slot < 0 <= block.host_slot for block in blocks)
                for blocks in self._waiting.values()
            )
        return self._num_swapped

    def expect(self, sequence: Sequence, blocks: Iterable[Block]) -> None:
        """A sequence waits that begins with ``blocks``, which are indexed."""
        self.forget(sequence)
        self._waiting[sequence] = list(blocks)
        self._counted_at = -1
        for block in reversed(self._waiting[sequence]):  # the last first, as in ``forget``
            block.waiters += 1
            if block.waiters == 1:
                self._pool.refile(block)

    def left_behind(self, sequence: Sequence, block: Block | None) -> bool:
        """Whether a block is the end of what a sequence computed, and nobody else needs it."""
        return (
            block is not None
            and self._waiting.get(sequence, [None])[-1] is block
            and block.ref_count == 0
            and block.slot >= 0
            and block.children is None
            and block.waiters == 1
            and not block.used_later
        )

    def forget(self, sequence: Sequence) -> None:
        """A sequence waits no longer."""
        blocks = self._waiting.pop(sequence, None)
        if blocks is None:
            return
        self._counted_at = -1
        for block in reversed(blocks):  # the last go first, as in ``BlockPool.release``
            block.waiters -= 1
            if block.waiters == 0:
                self._pool.refile(block)

    def forget_all(self) -> None:
        """Nothing waits any longer."""
        for sequence in list(self._waiting):
            self.forget(sequence)

    def note_use(self, sequence: Sequence) -> None:
        """A running sequence is done with its prompt's blocks: are there rows that need them?

        The row that arrived last of those that used a block says so.
        """
        state, size = sequence.state, self._pool.block_size
        shared = -(-state.request.shared_later // size)
        prompt_blocks = -(-state.request.num_prompt_tokens // size)
        for at, block in enumerate(sequence.blocks[:prompt_blocks]):
            self._note(block, state.arrival, used_later=at < shared)

    def note_copied(self, source: Block, sequence: Sequence) -> None:
        """A sequence took its own copy of an unreferenced block's first tokens.

        Rows after it that need these find them there.
        """
        self._note(source, sequence.state.arrival, used_later=False)

    def _note(self, block: Block, arrival: int, *, used_later: bool) -> None:
        if arrival >= block.last_arrival:
            block.last_arrival, block.used_later = arrival, used_later
            if block.parts:  # some may have been given up before
                self._pool.refile(block)

    def check_invariants(self) -> None:
        """Assert that blocks in the index know who waits for them."""
        waiters: dict[Block, int] = {}
        for blocks in self._waiting.values():
            for block in blocks:
                waiters[block] = waiters.get(block, 0) + 1
        for block in (*waiters, *self._pool.index.blocks()):
            assert block.waiters == waiters.get(block, 0)
        assert all(sequence.row < 0 for sequence in self._waiting)
