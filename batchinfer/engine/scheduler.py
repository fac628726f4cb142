"""Who runs next: one rule, ``num_computed`` chases ``num_tokens``.

There are no phases. A prompt computed in chunks, a prefix hit, a sequence that comes back after
preemption and plain decode differ only in how far the one number is behind the other (the rule is
vLLM v1's, vllm/v1/core/sched/scheduler.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.forecast import Forecast
from batchinfer.engine.gangs import Gangs, share_blocks
from batchinfer.engine.packing import Packing
from batchinfer.engine.prefix_index import Block, common_tokens
from batchinfer.engine.prefix_writer import PrefixWriter
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.table import Rows, SequenceTable

Int = npt.NDArray[np.integer]

_LOOK_AHEAD = 256
"""Waiting sequences looked at in a step behind others that hold back for a prefix."""
_MOST_SITTING_OUT = 0.25
"""Share of the running sequences that may miss a step for their last token's value. Half as much is
lost, as each then runs every other step; reading first costs the host's share of a step instead."""


@dataclass(slots=True)
class Schedule:
    """What the next step computes."""

    rows: Rows
    """[S] table rows; those that compute one token first."""
    num_new: Int
    """[S] tokens each computes."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source slot, destination slot)"""
    num_preempted: int = 0
    num_cached: int = 0
    """Prompt tokens found in the index, of rows admitted for the first time."""


@dataclass(slots=True)
class _Hit:
    """The computed prefix that a waiting sequence would start with."""

    blocks: list[Block]
    tail: Block | None
    num_tokens: int

    @property
    def joined(self) -> int:
        """Blocks that running sequences hold already; they lead, as tables share prefixes."""
        return sum(block.ref_count > 0 for block in self.blocks)


class Scheduler:
    """Decides each step; owns the waiting queue, the sequence table and the block pool.

    Args:
        pool: the KV pool's blocks.
        table: rows for running sequences.
        max_num_batched_tokens: most tokens in a step.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.table = table
        self.waiting: deque[Sequence] = deque()
        self.packing = Packing(pool, table)
        self.gangs = Gangs(pool, table, max_num_batched_tokens)
        self._max_tokens = max_num_batched_tokens
        self._prefixes = PrefixWriter(pool, table)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that wait."""
        self.waiting.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence that has run before those that have not."""
        self.waiting.appendleft(sequence)

    def schedule(self) -> Schedule | None:
        """The next step, with every block it writes to allocated.

        None if there is nothing to run, or none worth running before the step in flight is read;
        with nothing in flight it is the first.
        """
        self.gangs.join()
        schedule = self._continue_running()
        if schedule is None:
            return None
        self._prefixes.begin_step()
        self._prefixes.enter_prompts(schedule.rows, schedule.num_new)
        if schedule.num_preempted == 0 and self.waiting:
            self._admit(schedule)
        if len(schedule.rows) == 0:
            assert not self.waiting, "nothing runs, yet nothing was admitted"
            return None
        first_decodes = np.argsort(schedule.num_new != 1, kind="stable")
        schedule.rows = schedule.rows[first_decodes]
        schedule.num_new = schedule.num_new[first_decodes]
        return schedule

    def advance(self, schedule: Schedule, sampled: Rows, copies: Int) -> None:
        """The step was submitted: for every step after it, its tokens are computed and drawn.

        Args:
            schedule: what it computes.
            sampled: [R] rows that samples are drawn for.
            copies: [R] samples drawn for each.
        """
        table, rows = self.table, schedule.rows
        self.pool.settle()
        table.num_computed[rows] += schedule.num_new.astype(np.int32)
        table.computed_once[rows] = np.maximum(table.computed_once[rows], table.num_computed[rows])
        table.num_tokens[sampled] += 1
        table.sample_at[sampled] = np.cumsum(copies) - copies

    def retire(self, sampled: Rows) -> None:
        """Give up the rows whose last token, by length, was just submitted.

        The token is taken back from the sequence, which needs no row for it. The step reads the
        blocks before a later one writes to them (see ``Runner``).
        """
        table = self.table
        for row in sampled[table.num_tokens[sampled] >= table.max_total[sampled]]:
            sequence = table.sequence(row)
            sequence.given_back = sequence.blocks
            self.finish(sequence)

    def fork(self, parent: Sequence, child: Sequence, forecast: Forecast) -> None:
        """Run ``child``, which shares all tokens computed so far with ``parent``, if it fits.

        Otherwise it waits, and finds or recomputes the prefix when its turn comes. ``forecast``
        is the present one, forks before this one included.
        """
        table, row = self.table, parent.row
        computed = int(table.num_computed[row])
        child.computed_once = computed
        joined = computed // table.block_size  # a partly filled block will be copied
        remaining = self.packing.remaining(child)
        if not table.has_room() or not forecast.admit(child.num_tokens, remaining, joined):
            self.requeue(child)
            return
        share_blocks(self.pool, table, parent, child, computed)

    def finish(self, sequence: Sequence) -> None:
        """Give up a running sequence's row and blocks."""
        sequence.state.note_peak_blocks()
        self.pool.release(self.table.remove(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Give up an unfinished sequence; none of its blocks must be found again."""
        for block in (*sequence.blocks, *sequence.given_back):
            if block.indexed:
                self.pool.forget(block)
        if sequence.row >= 0:
            self.pool.release(self.table.remove(sequence))
        elif sequence in self.waiting:  # not there if it was drawn in this very step
            self.waiting.remove(sequence)

    def abort_all(self) -> None:
        """Drop every sequence, and take what no step is known to have filled out of the index."""
        self.pool.revoke()
        for sequence in list(self.table.running()):
            self.pool.release(self.table.remove(sequence))
        self.waiting.clear()

    def preempt(self, sequence: Sequence) -> int:
        """Take a running sequence's blocks, with those of its gang.

        It is recomputed when they are found again. Its tokens must be known: what it, or its
        gang's leader, computed is entered into the prefix index.

        Returns:
            Sequences that lost their blocks.
        """
        leader = sequence.gang[0]
        running = [member for member in sequence.gang if member.row >= 0]
        assert all(self.table.sample_at[member.row] < 0 for member in running)
        sequence.state.stats.preemptions += len(running)
        self._prefixes.enter_computed(leader)
        sequence.state.note_peak_blocks()
        for member in running:
            self.pool.release(self.table.remove(member))
        self.requeue(leader)
        return len(running)

    # -- sequences that run already ---------------------------------------------------------

    def _continue_running(self) -> Schedule | None:
        """Tokens and blocks for running sequences, preempting the newest where blocks lack.

        None where the step in flight is better read first: when too many sequences would sit
        out otherwise, and before any is preempted, as one that ended may free the blocks.
        """
        preempted = 0
        while True:
            running = self.table.rows()
            in_flight = self.table.sample_at[running] >= 0
            ready = ~in_flight | self._can_run_ahead(running)
            if np.count_nonzero(~ready) > _MOST_SITTING_OUT * len(running):
                return None
            rows, num_new = self._share_budget(running[ready])
            wanted = self._blocks_wanted(rows, num_new)
            if int(wanted.sum()) <= self.pool.num_available:
                break
            if in_flight.any():
                return None
            preempted += self.preempt(self.table.sequence(running[-1]))
        schedule = Schedule(rows, num_new, num_preempted=preempted)
        for at in np.flatnonzero(wanted):
            self._extend(int(rows[at]), int(num_new[at]), schedule.copies)
        return schedule

    def _can_run_ahead(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Rows whose next step does not depend on a token's value, or on forks it has to make."""
        table = self.table
        ahead: npt.NDArray[np.bool_] = ~table.needs_values[rows] & (table.unborn[rows] == 0)
        return ahead

    def _share_budget(self, rows: Rows) -> tuple[Rows, Int]:
        """Rows and tokens of each within the step's budget: decodes first, then the oldest."""
        pending = self.table.num_tokens[rows] - self.table.num_computed[rows]
        order = np.argsort(pending > 1, kind="stable")
        rows, pending = rows[order], pending[order]
        left = self._max_tokens - (np.cumsum(pending) - pending)
        num_new = self.gangs.keep_together(rows, np.clip(left, 0, pending))
        some = num_new > 0
        return rows[some], num_new[some]

    def _blocks_wanted(self, rows: Rows, num_new: Int) -> Int:
        """[S] blocks each row must be given: for new tokens, and to copy a shared last block."""
        table = self.table
        end = table.num_computed[rows] + num_new
        wanted: Int = -(-end // table.block_size) - table.num_blocks[rows]
        for at in np.flatnonzero(table.tail_shared[rows]):
            wanted[at] += self._must_copy_tail(int(rows[at]))
        return wanted

    def _must_copy_tail(self, row: int) -> bool:
        """Whether the row's next token goes into a block that others refer to as well."""
        table = self.table
        partly_filled = table.num_computed[row] % table.block_size != 0
        return bool(partly_filled) and table.sequence(row).blocks[-1].ref_count > 1

    def _extend(self, row: int, num_new: int, copies: list[tuple[int, int]]) -> None:
        """Give a row its own last block and the blocks its new tokens need."""
        table, pool = self.table, self.pool
        if table.tail_shared[row]:
            if self._must_copy_tail(row):  # copy-on-write
                own = pool.allocate()
                shared = table.replace_last_block(row, own)
                copies.append((shared.slot, own.slot))
                pool.release([shared])
            table.tail_shared[row] = False
        end = int(table.num_computed[row]) + num_new
        for _ in range(-(-end // table.block_size) - int(table.num_blocks[row])):
            table.append_block(row, pool.allocate())

    # -- sequences that wait ----------------------------------------------------------------

    def _admit(self, schedule: Schedule) -> None:
        """Start waiting sequences while tokens, rows and, by the forecast, blocks last."""
        budget = self._max_tokens - int(schedule.num_new.sum())
        forecast = self.packing.forecast()
        rows, chunks, sources = [], [], []
        at = 0
        while at < min(len(self.waiting), _LOOK_AHEAD) and budget > 0:
            sequence = self.waiting[at]
            if not self.table.has_room(sequence.request.gang_size):
                break
            hit, holds_back = self._find_prefix(sequence)
            if holds_back:
                at += 1
                continue
            chunk = min(budget, sequence.goal - hit.num_tokens)
            alone = self.table.num_running == 0
            fitting = self._fit(hit, chunk, required=alone)
            if fitting is None or not (
                self.packing.admit(forecast, sequence, fitting.joined) or alone
            ):
                break
            hit = fitting
            del self.waiting[at]
            self.packing.expect_samples(forecast, sequence)
            chunk = min(chunk, sequence.goal - hit.num_tokens)
            if hit.tail is not None:
                sources.append(hit.tail)
            row = self._start(sequence, hit, chunk, schedule)
            rows.append(row)
            chunks.append(chunk)
            budget -= chunk
        # A source of a copy keeps its slot until every block of this step is allocated.
        self.pool.release(sources)
        schedule.rows = np.concatenate([schedule.rows, np.asarray(rows, dtype=np.intp)])
        schedule.num_new = np.concatenate([schedule.num_new, np.asarray(chunks, dtype=np.int32)])

    def _find_prefix(self, sequence: Sequence) -> tuple[_Hit, bool]:
        """What the pool holds of a sequence, and whether waiting a step would find more.

        The last token to compute is never part of a hit: its logits are needed. A block that this
        step fills can be shared but not copied from, and a row that is computing a longer common
        prefix is worth waiting for; both are seen from the step itself, nothing is stored.
        """
        if sequence.state.computes_alone:
            return _Hit([], None, 0), False
        size, pool = self.table.block_size, self.pool
        key = sequence.key(0, sequence.goal - 1)
        match = pool.match(key)
        start = len(match.blocks) * size
        hit = _Hit(match.blocks, match.tail, start + match.tail_tokens)
        within_reach = start + match.tokens_in_flight
        node = match.blocks[-1] if match.blocks else pool.index.root
        for leader in self._prefixes.prefilling.get(node, ()):
            ahead = leader.key(start, leader.request.num_prompt_tokens)
            within_reach = max(within_reach, start + common_tokens(ahead, key[4 * start :]))
        gain = within_reach - hit.num_tokens
        if gain >= size:
            return hit, True
        # For less than a block a row waits once: neighbours in sorted order nearly always have
        # some tokens more in common, and would start one after the other.
        holds_back = gain * 16 >= sequence.num_tokens - hit.num_tokens and not sequence.held_back
        holds_back = holds_back and gain > 0
        sequence.held_back |= holds_back
        return hit, holds_back

    def _fit(self, hit: _Hit, chunk: int, *, required: bool) -> _Hit | None:
        """The hit, or less of it, such that its blocks and the chunk's are there; else None."""
        while True:
            revived = [*hit.blocks, hit.tail] if hit.tail is not None else hit.blocks
            idle = sum(block.ref_count == 0 for block in revived)
            end = hit.num_tokens + chunk
            fresh = -(-end // self.table.block_size) - len(hit.blocks)
            if fresh + idle <= self.pool.num_available:
                return hit
            if not required or hit.tail is None:
                return None
            # Alone in a pool that just holds it, a sequence cannot spare the copy's source.
            hit = _Hit(hit.blocks, None, len(hit.blocks) * self.table.block_size)

    def _start(self, sequence: Sequence, hit: _Hit, chunk: int, schedule: Schedule) -> int:
        """Make a waiting sequence run: take the hit's blocks, allocate the chunk's."""
        pool, table = self.pool, self.table
        joined = hit.joined
        for block in hit.blocks:
            pool.acquire(block)
        blocks = list(hit.blocks)
        if hit.tail is not None:
            pool.acquire(hit.tail)
            blocks.append(pool.allocate())
            schedule.copies.append((hit.tail.slot, blocks[-1].slot))
        first_seen = max(hit.num_tokens - sequence.computed_once, 0)
        sequence.state.stats.cached_tokens += first_seen
        schedule.num_cached += first_seen
        sequence.index_parent = pool.entry_below(hit.blocks)
        sequence.num_indexed = len(hit.blocks)
        row = table.add(sequence, blocks, hit.num_tokens, joined)
        self._extend(row, chunk, schedule.copies)
        new = np.asarray([row], dtype=np.intp), np.asarray([chunk], dtype=np.int32)
        self._prefixes.enter_prompts(*new)
        return row

    def check_invariants(self) -> None:
        """Assert that queue, table and pool agree."""
        self.table.check_invariants()
        self.gangs.check_invariants()
        self.pool.check_invariants(sequence.blocks for sequence in self.table.running())
        assert all(waiting.row < 0 and not waiting.blocks for waiting in self.waiting)
