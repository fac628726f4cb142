"""Beam groups: sequences that start and pause together.

``Sequence.group`` lists the sequences of a group. The beams of a group share an admission number,
so they are adjacent in the table's order, and preemption treats them as equally old.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_hit import find_prefix_hit
from batchinfer.engine.kv.prefix_index import common_tokens
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.kv_manager import KVManager
from batchinfer.engine.scheduler.preemption import ReuseHints
from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.sequence import Sequence


def num_tokens_to_compute(sequence: Sequence) -> int:
    """Return the number of tokens to compute before a sequence draws. If other beams wait for the
    sequence, its last token is excluded, so that these beams can join first."""
    return sequence.num_tokens - sequence.awaits_group


def num_pending_forks(sequence: Sequence) -> int:
    """Return the number of samples or beams that fork from a waiting sequence once its known tokens
    are computed."""
    if sequence.state.search is not None:
        return sequence.request.group_size - 1
    return 0 if sequence.output_ids else sequence.request.params.n - 1


class BeamGroups:
    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        kv_manager: KVManager,
        reuse_hints: ReuseHints,
        max_num_batched_tokens: int,
    ) -> None:
        self._pool = pool
        self._table = table
        self._kv_manager = kv_manager
        self._reuse_hints = reuse_hints
        self._most = max_num_batched_tokens

    def refusal(self, request: Request, blocks: int) -> tuple[str, str] | None:
        """Return the error code and message for a beam search that can never run, else None.

        Args:
            blocks: maximum number of blocks of one beam. In the worst case, beams share only the
                prompt's blocks.
        """
        width, pool = request.group_size, self._pool
        if width > self._most:
            return (
                "does_not_fit",
                f"{width} beams run together, but a step has at most {self._most} tokens; raise "
                "engine.max_num_batched_tokens or lower sampling.beam_width",
            )
        shared = min(request.num_prompt_tokens // pool.block_size, blocks)
        blocks = (shared + width * (blocks - shared)) * pool.slots_per_block
        blocks += width * pool.states.slots_per_state
        if blocks > pool.num_blocks:
            return (
                "does_not_fit",
                f"{width} beams may need {blocks} KV blocks, but the pool has "
                f"{pool.num_blocks}; raise engine.kv_cache_memory or lower "
                "sampling.max_tokens or beam_width",
            )
        return None

    def join(self) -> None:
        """Start the waiting beams of groups whose leaders have computed enough tokens.

        Each beam shares the leader's blocks up to the end of their common prefix. If the beam's own
        cached blocks hold more tokens and fit into the pool, the beam resumes from them instead.
        Table rows were reserved for the beams. A recurrent state includes all computed tokens, so
        leaders with a state stop where the first beam forks.
        """
        table = self._table
        for row in np.flatnonzero((table.pending_forks > 0) & table.is_beam):
            leader = table.sequence(row)
            absent = [beam for beam in leader.group if beam.row < 0]
            has_state = leader.recurrent_state is not None
            stop = leader.first_fork() if has_state else num_tokens_to_compute(leader)
            if not absent or table.num_computed[row] < stop:
                continue
            computed = leader.key(0, stop)
            for beam in absent:
                key = beam.key(0, stop)
                num_common = common_tokens(computed, key)
                can_resume = not (has_state or beam.state.skip_prefix_cache)
                if not can_resume or not self._resume_from_blocks(leader, beam, key, num_common):
                    self._fork(leader, beam, num_common)
                self._reuse_hints.remove(beam)
            table.pending_forks[row] = leader.request.group_size - len(leader.group)

    def replace(self, present: list[Sequence], next_beams: list[tuple[Sequence, int]]) -> None:
        """Replace the running beams of a group with the next beams.

        Args:
            next_beams: the next beams, each with the index of the present beam that it continues.
                The first beam that continues a present beam is the same ``Sequence``; others are
                new objects. All next beams already include their newest token.
        """
        table = self._table
        continuing = {beam for beam, _ in next_beams}
        for beam in present:
            if beam not in continuing:
                self._kv_manager.free(beam)
        for beam, parent in next_beams:
            if beam.row < 0:
                self._fork(present[parent], beam, beam.num_tokens - 1)
        rows = [beam.row for beam, _ in next_beams]
        table.last_token[rows] = [beam.output_ids[-1] for beam, _ in next_beams]
        table.sample_at[rows] = -1
        table.pending_forks[rows] = 0
        table.pending_forks[rows[0]] = next_beams[0][0].request.group_size - len(next_beams)

    def _resume_from_blocks(
        self, leader: Sequence, beam: Sequence, key: bytes, num_common: int
    ) -> bool:
        """Resume a beam from its cached blocks, if they hold more than ``num_common`` tokens.

        The beam must not depend on copies between device slots, because it may be preempted again
        before the step that makes the copies is submitted.
        """
        pool = self._pool
        match = pool.match(key, beam.request.adapter)
        hit = find_prefix_hit(pool, match)
        if self._reuse_hints.is_private_tail(beam, hit.tail):
            hit = replace(hit, owns_tail=True)
        else:
            hit = find_prefix_hit(pool, match, with_tail=False)
        if hit.num_tokens <= num_common or hit.num_idle > pool.num_available:
            return False
        self._kv_manager.start_with_prefix(beam, hit)
        self._share_admission(leader, beam)
        return True

    def _share_admission(self, beam: Sequence, other: Sequence) -> None:
        self._table.admission[other.row] = self._table.admission[beam.row]

    def _fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        self._kv_manager.share_blocks(parent, child, num_tokens)
        self._share_admission(parent, child)

    def trim_to_whole_groups(self, rows: Rows, num_new: Int) -> Int:
        """Return ``num_new`` [S], lowered where necessary for all beams of a group to reach their
        last tokens in the same step.

        If a beam cannot reach its last token yet, the other beams of its group stop one token
        earlier.
        """
        table = self._table
        beams = np.flatnonzero(table.is_beam[rows])
        if len(beams) == 0:
            return num_new
        pending = table.num_tokens[rows[beams]] - table.num_computed[rows[beams]]
        _, first, group_of = np.unique(
            table.admission[rows[beams]], return_index=True, return_inverse=True
        )
        sizes = np.array([len(table.sequence(row).group) for row in rows[beams[first]]])
        arriving = np.bincount(group_of, weights=num_new[beams] == pending)
        apart = (arriving < sizes)[group_of]
        trimmed = num_new.copy()
        trimmed[beams[apart]] = np.minimum(num_new[beams[apart]], pending[apart] - 1)
        return trimmed
