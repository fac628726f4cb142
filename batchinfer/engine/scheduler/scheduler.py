"""Scheduling by one rule: ``num_computed`` catches up with ``num_tokens``.

Scheduling has no phases. Chunked prefill, a prefix hit, a sequence that resumes after preemption,
and plain decode differ only in the distance between the two numbers. vLLM v1 introduced this rule
(vllm/v1/core/sched/scheduler.py).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from batchinfer.engine.images import last_cut
from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.scheduler.admission import Admission
from batchinfer.engine.scheduler.beam_groups import BeamGroups
from batchinfer.engine.scheduler.forecast import OutputLengths, PoolForecast
from batchinfer.engine.scheduler.kv_manager import KVManager
from batchinfer.engine.scheduler.preemption import PreemptionPolicy, ReuseHints
from batchinfer.engine.scheduler.schedule import Schedule, ScheduledRows
from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.scheduler.step_stats import step_stats
from batchinfer.engine.scheduler.step_tokens import note_tokens
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.stats import StepStats

_MOST_SITTING_OUT = 0.25
"""Largest share of running sequences that may skip a step because they need the value of their last
token. Sequences that skip steps run only every other step. With a larger share, the engine first
reads the step in flight, although the device then waits for the host."""


class Scheduler:
    """Chooses the rows of each step; owns the queue, the sequence table and the block pool."""

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        max_num_batched_tokens: int,
        preemption_policy: PreemptionPolicy | None = None,
    ) -> None:
        assert pool.windows == table.windows
        self.pool = pool
        self.table = table
        self.waiting: deque[Sequence] = deque()
        self.output_lengths = OutputLengths(table.max_model_len)
        self.reuse_hints = ReuseHints(pool)
        self._kv_manager = KVManager(pool, table)
        self.beam_groups = BeamGroups(
            pool, table, self._kv_manager, self.reuse_hints, max_num_batched_tokens
        )
        self.preemption_policy = preemption_policy or PreemptionPolicy()
        self.max_num_batched_tokens = max_num_batched_tokens
        """Maximum number of tokens in a step. Recovery from out-of-memory errors lowers the
        limit."""
        self._num_steps = 0
        self._admission = Admission(pool, table, self._kv_manager, self.reuse_hints)

    def add(self, sequence: Sequence) -> None:
        # The limit may be below the number of beams, or of an image's tokens, that must run
        # together.
        least = sequence.request.least_step_tokens
        self.max_num_batched_tokens = max(self.max_num_batched_tokens, least)
        self.waiting.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence at the front of the queue, because its row has already started."""
        self.waiting.appendleft(sequence)

    def schedule(self) -> Schedule | None:
        """Schedule the next step, and allocate every block that it writes.

        Returns None if no sequence can run, or if the step in flight should be read first.
        """
        self.beam_groups.join()
        chosen = self._continue_running()
        if chosen is None:
            return None
        self._kv_manager.begin_step()
        self._kv_manager.cache_prompt_blocks(chosen.rows, chosen.num_new)
        if chosen.num_preempted == 0 and self.waiting:
            budget = self.max_num_batched_tokens - int(chosen.num_new.sum())
            self._admission.admit(self.waiting, chosen, budget, self.forecast())
        if len(chosen.rows) == 0:
            assert not self.waiting, "no sequence is running, and none was admitted"
            return None
        return chosen.schedule(self.table, self.pool.take_copies())

    def advance(self, schedule: Schedule, now: float) -> StepStats:
        """Update the table as if a submitted step had already computed and drawn its tokens.

        Args:
            now: time on the engine's clock, in seconds.

        Returns:
            The step's statistics without times.
        """
        table, rows, sampled = self.table, schedule.rows, schedule.sampled
        tokens = note_tokens(table, schedule, now)
        self.pool.commit_fills()
        table.num_computed[rows] += schedule.num_new.astype(np.int32)
        self._kv_manager.free_outside_window(rows, schedule.num_new)
        self._kv_manager.keep_states(rows)
        table.computed_once[rows] = np.maximum(table.computed_once[rows], table.num_computed[rows])
        table.num_tokens[sampled] += 1
        table.awaits_first_token[sampled] = False
        table.sample_at[sampled] = np.cumsum(schedule.samples_per_row) - schedule.samples_per_row
        stats = step_stats(
            table,
            self.pool,
            schedule,
            tokens,
            step=self._num_steps,
            num_waiting=len(self.waiting),
            num_swapped=self.reuse_hints.num_swapped,
        )
        self._num_steps += 1
        self._retire(sampled)
        return stats

    def forecast(self) -> PoolForecast:
        return PoolForecast(self.pool, self.table, self.output_lengths)

    def fork(self, parent: Sequence, child: Sequence, forecast: PoolForecast) -> None:
        """Start ``child`` if it fits; it shares all computed tokens of ``parent``.

        If ``child`` does not fit, ``child`` waits. When admitted, ``child`` finds the prefix in the
        index or recomputes the prefix.

        Args:
            child: a new sample of the same row.
            forecast: forecast that includes earlier forks.
        """
        table, row = self.table, parent.row
        computed = int(table.num_computed[row])
        child.computed_once = computed
        num_shared = computed // table.block_size  # a partly filled block will be copied
        if not table.has_room() or not forecast.admit(child, num_shared):
            child.saved_state = self._kv_manager.keep_state(parent, computed, followers=1)
            match = self.pool.match(child.key(0, computed), child.request.adapter)
            tail = [] if match.tail is None else [match.tail]
            self.reuse_hints.add(child, [*match.blocks, *tail])
            self.requeue(child)
            return
        self._kv_manager.share_blocks(parent, child, computed)

    def finish(self, sequence: Sequence) -> None:
        sequence.state.note_peak_blocks()
        self.reuse_hints.note_use(sequence)
        self._kv_manager.free(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Drop an unfinished sequence and remove its blocks from the index."""
        self.reuse_hints.remove(sequence)
        self._kv_manager.forgo_saved_state(sequence)
        for block in (*sequence.blocks, *sequence.released_blocks):
            if block.indexed:
                self.pool.evict_subtree(block)
        if sequence.row >= 0:
            self._kv_manager.free(sequence)
        elif sequence in self.waiting:  # a sequence created in this step is not in the queue
            self.waiting.remove(sequence)

    def abort_all(self) -> None:
        """Drop every sequence and remove unconfirmed blocks from the index."""
        self.withdraw()
        self.waiting.clear()
        self.reuse_hints.remove_all()

    def withdraw(self) -> list[Sequence]:
        """Free all rows and discard unconfirmed blocks; return the sequences that ran."""
        self.pool.rollback()
        running = list(self.table.running())
        for sequence in running:
            self._kv_manager.free(sequence)
        return running

    def preempt(self, sequence: Sequence) -> int:
        """Free the blocks of a running sequence and its group; return the number of sequences.

        The values of their tokens must be known, because their computed blocks are indexed by
        token. The next admission finds blocks that are still on the device or host, and recomputes
        the rest.
        """
        running = [member for member in sequence.group if member.row >= 0]
        assert all(self.table.sample_at[member.row] < 0 for member in running)
        state = sequence.state
        swaps = self._should_swap(running)
        state.stats.preemptions += len(running)
        state.stats.swap_preemptions += swaps * len(running)
        state.note_peak_blocks()
        for member in running:
            entries = self._kv_manager.cache_computed_blocks(member)
            if swaps:
                self._kv_manager.save_state(member, entries)
                self.reuse_hints.add(member, entries)
        for member in reversed(running):
            self._kv_manager.free(member)
        self.requeue(sequence.group[0])
        return len(running)

    def _should_swap(self, running: list[Sequence]) -> bool:
        """Return true if running sequences that are preempted together should be swapped.

        Beams of a model with recurrent layers fork again from the state at the end of their common
        prefix, so their later states are of no use.
        """
        per_state = self.pool.states.slots_per_state
        uses_cache = not running[0].state.skip_prefix_cache
        can_swap_state = uses_cache and self.pool.host.num_slots >= per_state
        if per_state and (len(running) > 1 or not can_swap_state):
            return False
        tables = [member.blocks for member in running]
        return self.preemption_policy.should_swap(tables, self.pool.block_size, per_state)

    def _retire(self, sampled: Rows) -> None:
        """Free the rows of sequences that reach their maximum length with the step just submitted.

        Processing the last token needs the sequence but not its table row. The step reads the
        blocks before a later step writes to them (see ``Runner``).
        """
        table = self.table
        for row in sampled[table.num_tokens[sampled] >= table.max_total[sampled]]:
            sequence = table.sequence(row)
            sequence.released_blocks = sequence.blocks
            self.finish(sequence)

    def _continue_running(self) -> ScheduledRows | None:
        """Choose tokens to compute for running sequences; preempt the newest if blocks run out.

        Returns None if the step in flight should be read first: if too many sequences would skip
        this step, or if blocks run out. A sequence that ended in the step in flight may free
        blocks, which avoids a preemption.
        """
        preempted = 0
        while True:
            running = self.table.rows()
            in_flight = self.table.sample_at[running] >= 0
            ready = ~in_flight | self._can_run_ahead(running)
            if np.count_nonzero(~ready) > _MOST_SITTING_OUT * len(running):
                return None
            rows, num_new = self._share_budget(running[ready])
            needed = self._kv_manager.blocks_needed(rows, num_new)
            copies_state = self._kv_manager.copies_state(rows)
            slots = int(needed.sum()) * self.pool.slots_per_block
            slots += int(copies_state.sum()) * self.pool.states.slots_per_state
            if slots <= self.pool.num_available - self.pool.states.num_cached:
                break
            if self.pool.states.give_up_snapshot():
                continue
            if in_flight.any():
                return None
            preempted += self.preempt(self.table.sequence(running[-1]))
        for at in np.flatnonzero((needed > 0) | copies_state):
            self._kv_manager.allocate_slots(int(rows[at]), int(num_new[at]))
        return ScheduledRows(rows, num_new, preempted)

    def _can_run_ahead(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return [S] True for rows that need no token's value and have no pending fork."""
        table = self.table
        ahead: npt.NDArray[np.bool_] = ~table.needs_values[rows] & (table.pending_forks[rows] == 0)
        return ahead

    def _share_budget(self, rows: Rows) -> tuple[Rows, Int]:
        """Distribute the step's token budget over rows: decodes first, then the oldest rows."""
        computed = self.table.num_computed[rows]
        pending = np.minimum(self.table.num_tokens[rows], self.table.next_branch[rows]) - computed
        order = np.argsort(pending > 1, kind="stable")
        rows, pending = rows[order], pending[order]
        budget = self.max_num_batched_tokens - (np.cumsum(pending) - pending)
        num_new = self._trim_to_whole_images(rows, np.clip(budget, 0, pending))
        num_new = self.beam_groups.trim_to_whole_groups(rows, num_new)
        computes = num_new > 0
        return rows[computes], num_new[computes]

    def _trim_to_whole_images(self, rows: Rows, num_new: Int) -> Int:
        """Return ``num_new`` [S], lowered so that no chunk splits an image that one step must
        compute."""
        table, trimmed = self.table, num_new.copy()
        computed = table.num_computed[rows]
        ends = computed + num_new
        for at in np.flatnonzero(table.has_whole_images[rows] & (ends < table.num_prompt[rows])):
            end = last_cut(table.sequence(rows[at]).request.images, int(ends[at]))
            trimmed[at] = max(end - computed[at], 0)
        return trimmed
