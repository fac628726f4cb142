"""Manages the blocks of running sequences: allocates, shares, frees and indexes them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_hit import AcquiredPrefix, PrefixHit, acquire_prefix
from batchinfer.engine.kv.prefix_index import Block, RecurrentState, StateSnapshot
from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.sequence import Sequence


class KVManager:
    """Manages the blocks of running sequences.

    Other rows may use blocks of a prompt, but only the row itself uses blocks of its output. A
    prompt's block is therefore indexed when the step that fills it is scheduled, and an output's
    block only when its sequence is preempted. Steps that only decode index no blocks.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable) -> None:
        self._pool = pool
        self._table = table
        self.prefilling: dict[Block, list[Sequence]] = {}
        """Sequences whose prompts this step does not finish, keyed by their last indexed block."""

    def begin_step(self) -> None:
        self.prefilling = {}

    def start_with_prefix(self, sequence: Sequence, hit: PrefixHit) -> AcquiredPrefix:
        """Give a sequence a row with the blocks of a prefix hit."""
        pool, num_shared = self._pool, hit.num_shared
        if hit.snapshot is not None:  # keep the snapshot from eviction
            pool.states.acquire(hit.snapshot.state)
        acquired = acquire_prefix(pool, hit)
        sequence.state.stats.swapped_blocks += acquired.num_swapped
        sequence.index_parent = pool.entry_below(hit.blocks, sequence.request.adapter)
        sequence.num_indexed = len(hit.blocks)
        sequence.num_evicted = hit.num_evicted
        self._table.add(sequence, acquired.blocks, hit.num_tokens, num_shared)
        if pool.states.slots_per_state:
            self._table.set_state(sequence, self._first_state(sequence, hit), is_shared=False)
        return acquired

    def _first_state(self, sequence: Sequence, hit: PrefixHit) -> RecurrentState:
        states, more = self._pool.states, more_followers(sequence, hit)
        if sequence.saved_state is hit.snapshot:
            sequence.saved_state = None
        self.forgo_saved_state(sequence)
        if hit.snapshot is None:
            return states.allocate()
        states.release(hit.snapshot.state)
        sequence.state.stats.swapped_blocks += len(hit.snapshot.state.host_slots)
        return states.start_from(hit.snapshot, self._pool.block_copies, more)

    def forgo_saved_state(self, sequence: Sequence) -> None:
        """Give up the snapshot that was taken for a sequence; drop it if no other row needs it."""
        saved, sequence.saved_state = sequence.saved_state, None
        if saved is not None:
            self._pool.states.forgo(saved)

    def free(self, sequence: Sequence) -> None:
        """Free a running sequence's row, and release its blocks and recurrent state."""
        state, sequence.recurrent_state = sequence.recurrent_state, None
        self._pool.release(self._table.remove(sequence), sequence.num_evicted)
        if state is not None:
            self._pool.states.release(state)

    def share_blocks(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Give ``child`` a row with the first ``num_tokens`` tokens computed by ``parent``.

        If the sequences share a partly filled last block, the first sequence that writes to the
        block copies it.
        """
        pool, table = self._pool, self._table
        blocks = parent.blocks[: -(-num_tokens // table.block_size)]
        child.num_evicted = pool.window_slots.num_evicted(num_tokens)
        for at, block in enumerate(blocks):
            pool.acquire(block, at, child.num_evicted)
        full = num_tokens // table.block_size
        child.index_parent, child.num_indexed = None, 0
        if full >= parent.num_indexed:
            child.index_parent, child.num_indexed = parent.index_parent, parent.num_indexed
        table.add(child, blocks, num_tokens, full)
        table.tail_shared[[parent.row, child.row]] = True
        if parent.recurrent_state is not None:
            assert num_tokens == table.num_computed[parent.row], "a state has one position"
            pool.states.acquire(parent.recurrent_state)
            table.set_state(child, parent.recurrent_state, is_shared=True)
            table.state_shared[parent.row] = True

    def blocks_needed(self, rows: Rows, num_new: Int) -> Int:
        """Return the number of blocks to allocate for each row's new tokens and for a copy of its
        shared last block, [S]."""
        table = self._table
        end = table.num_computed[rows] + num_new
        needed: Int = -(-end // table.block_size) - table.num_blocks[rows]
        copies: Counter[Block] = Counter()
        for at in np.flatnonzero(table.tail_shared[rows]):
            last = table.sequence(rows[at]).blocks[-1]
            if self._must_copy_tail(int(rows[at])) and copies[last] < last.ref_count - 1:
                copies[last] += 1  # the sequence with the last reference writes in place
                needed[at] += 1
        return needed

    def copies_state(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return [S] True for each row that must copy its recurrent state before a step."""
        table, copies = self._table, Counter[RecurrentState]()
        is_copied = np.zeros(len(rows), dtype=np.bool_)
        for at in np.flatnonzero(table.state_shared[rows]):
            state = table.sequence(rows[at]).recurrent_state
            if state is not None and copies[state] < state.ref_count - 1:
                copies[state] += 1  # the sequence with the last reference writes in place
                is_copied[at] = True
        return is_copied

    def allocate_slots(self, row: int, num_new: int) -> None:
        """Copy a row's shared last block and state, and allocate blocks for its new tokens."""
        table, pool = self._table, self._pool
        if table.state_shared[row]:
            sequence = table.sequence(row)
            state = sequence.recurrent_state
            assert state is not None
            if state.ref_count > 1:
                state = pool.states.copy(state, pool.block_copies.within)
            table.set_state(sequence, state, is_shared=False)
        if table.tail_shared[row]:
            if self._must_copy_tail(row):  # copy-on-write
                block = pool.allocate()
                shared = table.replace_last_block(row, block)
                pool.copy(shared, block)
                pool.release([shared])
            table.tail_shared[row] = False
        end = int(table.num_computed[row]) + num_new
        for _ in range(-(-end // table.block_size) - int(table.num_blocks[row])):
            table.append_block(row, pool.allocate())

    def free_outside_window(self, rows: Rows, num_new: Int) -> None:
        """Free slots behind the windows of sequences whose step was just submitted.

        The step reads the slots before a later step writes to them, because steps run in order (see
        ``Runner``). A sequence keeps its slots if other sequences will fork from it at an earlier
        token.

        Args:
            num_new: [S] number of tokens in the step; ``num_computed`` already includes them.
        """
        table, window_slots = self._table, self._pool.window_slots
        if not window_slots.windows:
            return
        after = table.num_computed[rows]
        moved = (table.num_evicted(after) > table.num_evicted(after - num_new)).any(axis=0)
        for row in rows[moved]:
            sequence = table.sequence(row)
            if sequence.awaits_group:
                continue
            sequence.state.note_peak_blocks()
            num_evicted = window_slots.num_evicted(int(table.num_computed[row]))
            leaving = zip(sequence.num_evicted, num_evicted, strict=True)
            for group, (start, stop) in enumerate(leaving):
                for block in sequence.blocks[start:stop]:
                    window_slots.release(block.window_slots[group])
            sequence.num_evicted = num_evicted

    def keep_states(self, rows: Rows) -> None:
        """Take snapshots of the recurrent states of rows that have reached a branch point."""
        table = self._table
        for row in rows[table.num_computed[rows] == table.next_branch[rows]]:
            sequence, at = table.sequence(row), int(table.num_computed[row])
            followers = dict(sequence.request.branch_points).get(at)
            if followers is not None:  # None: only beams fork at this token
                self.keep_state(sequence, at, followers)
            table.find_next_branch(row)

    def keep_state(self, sequence: Sequence, at: int, followers: int) -> StateSnapshot | None:
        """Take a snapshot of a running sequence's recurrent state, for rows that start from it.

        A snapshot is taken only if the sequence's blocks are indexed and a copy of the state fits.
        The copy must fit on the host, or in the pool without evicting snapshots that have at least
        as many followers.

        Args:
            at: number of the sequence's computed tokens.
            followers: number of rows that will start from the snapshot.

        Returns:
            The snapshot, whose ``followers`` include these rows, or None.
        """
        pool, size, state = self._pool, self._pool.block_size, sequence.recurrent_state
        available = pool.num_available - pool.states.num_cached
        available += pool.states.num_less_wanted(followers)
        has_space = max(available, pool.host.num_free) >= pool.states.slots_per_state
        if state is None or not has_space:
            return None
        parent = sequence.index_parent
        if parent is None or sequence.num_indexed != at // size:
            return None
        key = sequence.key((at - 1) // size * size, at)
        block = pool.index.child(parent, key) if at % size else parent
        if block is None or not block.indexed:
            return None
        self._table.state_shared[sequence.row] = True
        return pool.states.keep(state, block, key, followers, self._blocks_in_windows(at))

    def save_state(self, sequence: Sequence, entries: list[Block]) -> None:
        """Take a snapshot of the recurrent state of a sequence that is about to be swapped.

        Args:
            entries: indexed blocks of all its computed tokens, from ``cache_computed_blocks``.
        """
        at, size = int(self._table.num_computed[sequence.row]), self._pool.block_size
        if sequence.recurrent_state is None or len(entries) != -(-at // size) or not entries:
            return
        key, in_windows = sequence.key((at - 1) // size * size, at), self._blocks_in_windows(at)
        sequence.saved_state = self._pool.states.keep(
            sequence.recurrent_state, entries[-1], key, 1, in_windows
        )

    def _blocks_in_windows(self, num_tokens: int) -> tuple[int, ...]:
        num_blocks = -(-num_tokens // self._pool.block_size)
        return tuple(
            num_blocks - count for count in self._pool.window_slots.num_evicted(num_tokens)
        )

    def cache_prompt_blocks(self, rows: Rows, num_new: Int) -> None:
        """Index the prompt blocks that this step fills, including a partly filled last block."""
        start, prompt = self._table.num_computed[rows], self._table.num_prompt[rows]
        for at in np.flatnonzero(start < prompt):
            end = int(start[at] + num_new[at])
            self._cache_prompt(self._table.sequence(rows[at]), end, int(prompt[at]))

    def cache_computed_blocks(self, sequence: Sequence) -> list[Block]:
        """Index all computed tokens of a running sequence, including a partly filled last block.

        Returns:
            The indexed blocks that hold these tokens.
        """
        computed, size = int(self._table.num_computed[sequence.row]), self._pool.block_size
        parent, entries = self._pool.entry_below([], sequence.request.adapter), list[Block]()
        for block, start in zip(sequence.blocks, range(0, computed, size), strict=True):
            if parent is None:
                break
            key = sequence.key(start, min(start + size, computed))
            parent = self._pool.insert_block(parent, block, key)
            if parent is not None:
                self._pool.mark_filled(parent)
                entries.append(parent)
        return entries

    def _must_copy_tail(self, row: int) -> bool:
        """Return true if the row's next token goes into a block that other sequences use."""
        table = self._table
        partly_filled = table.num_computed[row] % table.block_size != 0
        return bool(partly_filled) and table.sequence(row).blocks[-1].ref_count > 1

    def _cache_prompt(self, sequence: Sequence, end: int, prompt: int) -> None:
        """Index the prompt blocks that this step fills by computing the tokens before ``end``."""
        size, pool = self._pool.block_size, self._pool
        while sequence.index_parent is not None and sequence.num_indexed < min(end, prompt) // size:
            at, blocks = sequence.num_indexed, sequence.blocks
            key = sequence.key(at * size, (at + 1) * size)
            entry = pool.insert_block(sequence.index_parent, blocks[at], key)
            if entry is not None and entry is not blocks[at] and not pool.slots_per_block:
                # Equal blocks without slots are interchangeable. Refer to the indexed block, so
                # that it stays in the index.
                pool.acquire(entry)
                pool.release([blocks[at]])
                blocks[at] = entry
            sequence.index_parent = entry
            sequence.num_indexed += 1
        parent = sequence.index_parent
        if parent is None:
            return
        if end < prompt:
            self.prefilling.setdefault(parent, []).append(sequence)
            stop = end if end == self._table.next_branch[sequence.row] else 0
        else:
            stop = prompt if end // size == prompt // size else 0
        if stop % size:
            key = sequence.key(stop - stop % size, stop)
            pool.insert_block(parent, sequence.blocks[stop // size], key)


def more_followers(sequence: Sequence, hit: PrefixHit) -> int:
    """Return how many followers to add to the snapshot of a hit when a sequence starts from it.

    A sequence adds nothing to a snapshot that was taken for the sequence itself. A preempted
    sequence that had already computed these tokens adds only itself, because the snapshot no longer
    counts the sequence. A new sequence adds the later rows that diverge from it at this point.
    """
    if sequence.saved_state is hit.snapshot:
        return 0
    if sequence.computed_once >= hit.num_tokens:
        return 1
    return dict(sequence.request.branch_points).get(hit.num_tokens, 0)
