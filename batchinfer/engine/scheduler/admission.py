"""Admission: chooses the waiting sequences that start, and their prefix hits."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from batchinfer.engine.images import last_cut
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.prefix_hit import PrefixHit, find_prefix_hit, no_hit
from batchinfer.engine.kv.prefix_index import Block, PrefixMatch, common_tokens
from batchinfer.engine.scheduler.beam_groups import (
    num_pending_forks,
    num_tokens_to_compute,
)
from batchinfer.engine.scheduler.forecast import PoolForecast
from batchinfer.engine.scheduler.kv_manager import KVManager, more_followers
from batchinfer.engine.scheduler.preemption import ReuseHints
from batchinfer.engine.scheduler.schedule import ScheduledRows
from batchinfer.engine.scheduler.sequence_table import SequenceTable, branches_after, next_stop
from batchinfer.engine.sequence import Sequence

_LOOK_AHEAD = 256
"""Maximum number of waiting sequences to consider in a step, including those that it defers."""


class Admission:
    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        kv_manager: KVManager,
        reuse_hints: ReuseHints,
    ) -> None:
        self._pool = pool
        self._table = table
        self._kv_manager = kv_manager
        self._reuse_hints = reuse_hints

    def admit(
        self, waiting: deque[Sequence], chosen: ScheduledRows, budget: int, forecast: PoolForecast
    ) -> None:
        """Start waiting sequences until tokens, table rows or forecast blocks run out.

        Args:
            chosen: rows chosen for the step; receives the rows that start.
            budget: number of tokens that the step can still take.
            forecast: forecast for the running sequences; receives the rows that start.
        """
        rows: list[int] = []
        chunks: list[int] = []
        sources: list[Block] = []
        at = 0
        while at < min(len(waiting), _LOOK_AHEAD) and budget > 0:
            sequence = waiting[at]
            if not self._table.has_room(sequence.request.group_size):
                break
            full_hit, defers = self._find_prefix(sequence)
            if defers:
                forecast.expect_follower()
                at += 1
                continue
            hit = self._fitting(sequence, full_hit, budget, forecast)
            chunk = 0 if hit is None else self._first_chunk(sequence, hit, budget)
            if hit is None or chunk == 0:  # the next image is larger than the budget
                break
            del waiting[at]
            forecast.expect_samples(sequence)
            rows.append(self._start(sequence, hit, chunk, chosen, sources))
            chunks.append(chunk)
            budget -= chunk
        # Sources of copies keep their slots until every block of this step is allocated.
        self._pool.release(sources)
        chosen.append(rows, chunks)

    def _find_prefix(self, sequence: Sequence) -> tuple[PrefixHit, bool]:
        """Return a sequence's prefix hit, and true if the sequence should wait for a longer hit.

        A hit never includes a token whose logits are needed, such as the last token. Waiting helps
        if this step fills a block that can be copied only in the next step, or if a running row is
        computing a longer common prefix.
        """
        if sequence.state.skip_prefix_cache:
            return no_hit(self._pool), False
        size, pool = self._table.block_size, self._pool
        fork_at = self._fork_at(sequence)
        most = _max_prefix_hit(sequence)
        if fork_at is not None and pool.states.slots_per_state:
            most = min(most, fork_at - 1)  # the group needs the state at its fork, not later
        key = sequence.key(0, most)
        adapter = sequence.request.adapter
        match = pool.match(key, adapter)
        hit = find_prefix_hit(pool, match, fork_at=fork_at)
        if pool.states.slots_per_state:
            return hit, self._reaches_snapshot(sequence, match, key) > hit.num_tokens
        if self._reuse_hints.is_private_tail(sequence, hit.tail):
            hit = replace(hit, owns_tail=True)
        start = len(hit.blocks) * size
        ends_match = len(hit.blocks) == len(match.blocks)
        within_reach = start + (match.tokens_in_flight if ends_match else 0)
        node = hit.blocks[-1] if hit.blocks else pool.index.root(adapter)
        for leader in self._kv_manager.prefilling.get(node, ()):
            ahead = leader.key(start, leader.request.num_prompt_tokens)
            within_reach = max(within_reach, start + common_tokens(ahead, key[4 * start :]))
        gain = within_reach - hit.num_tokens
        if gain >= size:
            return hit, True
        # A row waits only once for a gain of less than a block. Neighbors in sorted order nearly
        # always share a few more tokens, so without this limit they would start one by one.
        defers = gain * 16 >= sequence.num_tokens - hit.num_tokens and not sequence.deferred
        defers = defers and gain > 0
        sequence.deferred |= defers
        return hit, defers

    def _reaches_snapshot(self, sequence: Sequence, match: PrefixMatch, key: bytes) -> int:
        """Return the number of tokens of the longest snapshot that a running row will take of its
        prompt and that ``sequence`` can start from; 0 if there is none."""
        start = len(match.blocks) * self._table.block_size
        node = match.blocks[-1] if match.blocks else None
        node = node or self._pool.index.root(sequence.request.adapter)
        longest = 0
        for leader in self._kv_manager.prefilling.get(node, ()):
            ahead = leader.key(start, leader.request.num_prompt_tokens)
            common = start + common_tokens(ahead, key[4 * start :])
            computed = self._table.num_computed[leader.row]
            last = min(common, leader.request.logits_from)
            points = (at for at, _ in leader.request.branch_points if computed < at <= last)
            longest = max(longest, *points, 0)
        return longest

    def _fork_at(self, sequence: Sequence) -> int | None:
        """Return the number of tokens after which the group forks. Return None if the sequence has
        no group, or if the group can fork at any token because it shares only full-attention
        blocks."""
        pool = self._pool
        forks_anywhere = not pool.window_slots.windows and not pool.states.slots_per_state
        return None if forks_anywhere or len(sequence.group) == 1 else sequence.first_fork()

    def _fitting(
        self, sequence: Sequence, hit: PrefixHit, budget: int, forecast: PoolForecast
    ) -> PrefixHit | None:
        """Return the hit, or a part of it, if the sequence can start, else None.

        A sequence can always start if no other sequence is running.
        """
        alone = self._table.num_running == 0
        fitting = self._fit(sequence, hit, budget, required=alone)
        if fitting is None:
            return None
        num_snapshots = len(branches_after(sequence, fitting.num_tokens))
        if sequence.state.search is None:  # samples that cannot start at once need a snapshot
            num_snapshots += num_pending_forks(sequence) > 0
        if fitting.snapshot is not None:  # the last follower takes over the state
            more = more_followers(sequence, fitting)
            num_snapshots -= self._pool.states.is_last_use(fitting.snapshot, more)
        fits = forecast.admit_group(sequence, fitting.num_shared, num_snapshots)
        return fitting if fits or alone else None

    def _fit(
        self, sequence: Sequence, hit: PrefixHit, budget: int, *, required: bool
    ) -> PrefixHit | None:
        """Return the hit or a part of it that leaves enough available blocks, else None."""
        while True:
            end = hit.num_tokens + self._first_chunk(sequence, hit, budget)
            fresh = -(-end // self._table.block_size) - len(hit.blocks)
            slots = fresh * self._pool.slots_per_block
            slots += self._pool.states.slots_to_start_from(
                hit.snapshot, more_followers(sequence, hit)
            )
            if slots + hit.num_idle <= self._pool.num_available:
                return hit
            if not required or hit.num_tokens == 0:
                return None
            if hit.snapshot is not None:
                hit = no_hit(self._pool)
                continue
            if hit.tail is None:
                return None
            # If the pool barely holds this sequence, there is no space for the source of a copied
            # block.
            match = PrefixMatch(hit.blocks, None, 0, 0)
            hit = find_prefix_hit(self._pool, match, fork_at=self._fork_at(sequence))

    def _first_chunk(self, sequence: Sequence, hit: PrefixHit, budget: int) -> int:
        end = num_tokens_to_compute(sequence)
        if self._pool.states.slots_per_state:
            end = min(end, next_stop(sequence, hit.num_tokens))
        end = min(end, last_cut(sequence.request.images, hit.num_tokens + budget))
        return max(end - hit.num_tokens, 0)

    def _start(
        self,
        sequence: Sequence,
        hit: PrefixHit,
        chunk: int,
        chosen: ScheduledRows,
        sources: list[Block],
    ) -> int:
        """Start a waiting sequence: acquire the hit's blocks, and allocate blocks for the chunk."""
        acquired = self._kv_manager.start_with_prefix(sequence, hit)
        sources += acquired.sources
        self._reuse_hints.remove(sequence)
        for source in acquired.sources:
            self._reuse_hints.note_copied(source, len(hit.blocks), sequence)
        first_seen = max(hit.num_tokens - sequence.computed_once, 0)
        sequence.state.stats.cached_tokens += first_seen
        chosen.num_cached += first_seen
        row = sequence.row
        self._table.pending_forks[row] = num_pending_forks(sequence)
        self._kv_manager.allocate_slots(row, chunk)
        new = np.asarray([row], dtype=np.intp), np.asarray([chunk], dtype=np.int32)
        self._kv_manager.cache_prompt_blocks(*new)
        return row


def _max_prefix_hit(sequence: Sequence) -> int:
    """Return the maximum length of a prefix hit, which ends before a token that needs logits."""
    scores, all_but_last = sequence.state.scores, num_tokens_to_compute(sequence) - 1
    if scores is None or scores.next >= scores.stop:
        return all_but_last
    return min(scores.next, all_but_last)
