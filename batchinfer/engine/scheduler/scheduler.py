"""Scheduling by one rule: ``num_computed`` chases ``num_tokens``.

There are no phases. A prompt computed in chunks, a prefix hit, a sequence that comes back after
preemption and plain decode differ only in how far the one number is behind the other (the rule is
vLLM v1's, vllm/v1/core/sched/scheduler.py).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.scheduler.admission import Admission
from batchinfer.engine.scheduler.beam_groups import BeamGroups
from batchinfer.engine.scheduler.forecast import OutputLengths, PoolForecast
from batchinfer.engine.scheduler.kv_manager import KVManager
from batchinfer.engine.scheduler.preemption import PreemptionPolicy, ReuseHints
from batchinfer.engine.scheduler.schedule import Schedule, ScheduledRows
from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.scheduler.step_stats import note_tokens, step_stats
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.stats import StepStats

_MOST_SITTING_OUT = 0.25
"""Share of the running sequences that may miss a step for their last token's value. Half as much is
lost, as each then runs every other step; reading first costs the host's share of a step instead."""


class Scheduler:
    """Decides each step; owns the waiting queue, the sequence table and the block pool.

    Args:
        pool: the KV pool's blocks.
        table: rows for running sequences.
        max_num_batched_tokens: most tokens in a step.
        preemption_policy: swaps or recomputes what a preempted sequence computed.
    """

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
        """Most tokens in a step from now on."""
        self._num_steps = 0
        self._admission = Admission(pool, table, self._kv_manager, self.reuse_hints)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that wait."""
        # Lowered meanwhile, it may be too little for beams that run together.
        group_size = sequence.request.group_size
        self.max_num_batched_tokens = max(self.max_num_batched_tokens, group_size)
        self.waiting.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a sequence that has run before those that have not."""
        self.waiting.appendleft(sequence)

    def schedule(self) -> Schedule | None:
        """The next step, with every block it writes to allocated.

        None if there is nothing to run, or none worth running before the step in flight is read;
        with nothing in flight it is the first.
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
            assert not self.waiting, "nothing runs, yet nothing was admitted"
            return None
        return chosen.schedule(self.table, self.pool.take_copies())

    def advance(self, schedule: Schedule, now: float) -> StepStats:
        """Count a submitted step's tokens as computed and drawn, for every step after it.

        Args:
            schedule: the step's.
            now: the engine's clock, in seconds.

        Returns:
            Its statistics, without its times.
        """
        table, rows, sampled = self.table, schedule.rows, schedule.sampled
        tokens = note_tokens(table, schedule, now)
        self.pool.commit_fills()
        table.num_computed[rows] += schedule.num_new.astype(np.int32)
        self._kv_manager.free_outside_window(rows, schedule.num_new)
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
        """Forecast of the pool with the sequences that run now."""
        return PoolForecast(self.pool, self.table, self.output_lengths)

    def fork(self, parent: Sequence, child: Sequence, forecast: PoolForecast) -> None:
        """Run ``child``, which shares all tokens computed so far with ``parent``, if it fits.

        Otherwise it waits, and finds or recomputes the prefix when its turn comes. ``forecast``
        is the present one, forks before this one included.
        """
        table, row = self.table, parent.row
        computed = int(table.num_computed[row])
        child.computed_once = computed
        num_shared = computed // table.block_size  # a partly filled block will be copied
        if not table.has_room() or not forecast.admit(child, num_shared):
            match = self.pool.match(child.key(0, computed), child.request.adapter)
            tail = [] if match.tail is None else [match.tail]
            self.reuse_hints.add(child, [*match.blocks, *tail])
            self.requeue(child)
            return
        self._kv_manager.share_blocks(parent, child, computed)

    def finish(self, sequence: Sequence) -> None:
        """Free a running sequence's row and blocks."""
        sequence.state.note_peak_blocks()
        self.reuse_hints.note_use(sequence)
        self.pool.release(self.table.remove(sequence), sequence.num_evicted)

    def drop(self, sequence: Sequence) -> None:
        """Drop an unfinished sequence; none of its blocks must be found again."""
        self.reuse_hints.remove(sequence)
        for block in (*sequence.blocks, *sequence.released_blocks):
            if block.indexed:
                self.pool.evict_subtree(block)
        if sequence.row >= 0:
            self.pool.release(self.table.remove(sequence), sequence.num_evicted)
        elif sequence in self.waiting:  # not there if it was drawn in this very step
            self.waiting.remove(sequence)

    def abort_all(self) -> None:
        """Drop every sequence, and take what no step is known to have filled out of the index."""
        self.withdraw()
        self.waiting.clear()
        self.reuse_hints.remove_all()

    def withdraw(self) -> list[Sequence]:
        """Take all rows and blocks back, trusting nothing that a step not read was to fill.

        Returns:
            The sequences that ran.
        """
        self.pool.rollback()
        running = list(self.table.running())
        for sequence in running:
            self.pool.release(self.table.remove(sequence), sequence.num_evicted)
        return running

    def preempt(self, sequence: Sequence) -> int:
        """Take a running sequence's blocks, with those of its group.

        Its tokens must be known: what it computed is entered into the prefix index. Blocks that
        are still there, or on the host, when it comes back are found; others are recomputed.

        Returns:
            Sequences that lost their blocks.
        """
        running = [member for member in sequence.group if member.row >= 0]
        assert all(self.table.sample_at[member.row] < 0 for member in running)
        state = sequence.state
        swaps = self.preemption_policy.should_swap(
            [member.blocks for member in running], self.pool.block_size
        )
        state.stats.preemptions += len(running)
        state.stats.swap_preemptions += swaps * len(running)
        state.note_peak_blocks()
        for member in running:
            entries = self._kv_manager.cache_computed_blocks(member)
            if swaps:
                self.reuse_hints.add(member, entries)
        for member in reversed(running):
            self.pool.release(self.table.remove(member), member.num_evicted)
        self.requeue(sequence.group[0])
        return len(running)

    def _retire(self, sampled: Rows) -> None:
        """Free the rows whose last token, by length, was just submitted.

        Processing the token takes the sequence, but no row for it. The step reads the
        blocks before a later one writes to them (see ``Runner``).
        """
        table = self.table
        for row in sampled[table.num_tokens[sampled] >= table.max_total[sampled]]:
            sequence = table.sequence(row)
            sequence.released_blocks = sequence.blocks
            self.finish(sequence)

    def _continue_running(self) -> ScheduledRows | None:
        """What the running sequences compute, the newest preempted where blocks lack.

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
            needed = self._kv_manager.blocks_needed(rows, num_new)
            if int(needed.sum()) * self.pool.slots_per_block <= self.pool.num_available:
                break
            if in_flight.any():
                return None
            preempted += self.preempt(self.table.sequence(running[-1]))
        for at in np.flatnonzero(needed):
            self._kv_manager.allocate_slots(int(rows[at]), int(num_new[at]))
        return ScheduledRows(rows, num_new, preempted)

    def _can_run_ahead(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Rows whose next step does not depend on a token's value, or on forks it has to make."""
        table = self.table
        ahead: npt.NDArray[np.bool_] = ~table.needs_values[rows] & (table.pending_forks[rows] == 0)
        return ahead

    def _share_budget(self, rows: Rows) -> tuple[Rows, Int]:
        """Rows and tokens of each within the step's budget: decodes first, then the oldest."""
        pending = self.table.num_tokens[rows] - self.table.num_computed[rows]
        order = np.argsort(pending > 1, kind="stable")
        rows, pending = rows[order], pending[order]
        budget = self.max_num_batched_tokens - (np.cumsum(pending) - pending)
        num_new = self.beam_groups.trim_to_whole_groups(rows, np.clip(budget, 0, pending))
        computes = num_new > 0
        return rows[computes], num_new[computes]
