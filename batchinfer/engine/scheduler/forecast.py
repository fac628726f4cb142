"""Forecasts output lengths and pool use, which decide how many rows are admitted.

Reserving ``max_tokens`` for every sequence would leave half the pool idle, and admitting rows until
the pool is full would cause many preemptions. Instead, every running sequence gets a predicted
length. A row is admitted if the predicted block tables fit into the pool at every later step.
Preemption corrects errors of the forecast.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchinfer.engine.kv.block_pool import BlockPool
from batchinfer.engine.kv.layer_groups import most_in_window
from batchinfer.engine.scheduler.sequence_table import Rows, SequenceTable
from batchinfer.engine.sequence import Sequence

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.integer]

_FIRST_GUESS = 4.0
"""Until the first output ends, outputs are assumed to be this many times shorter than the limit."""
_SHRINK = 4.0
"""Weight of the job's overall stop rate when it is averaged with the stop rate at one length. A
sequence that reached this length has weight 1."""
_WATERMARK = 0.01
"""Share of the pool that admission leaves free while no row's output length is known. The more
lengths are known, the smaller the share."""
_MOST_SNAPSHOTS = 0.5
"""Largest share of the pool that is reserved for snapshots of recurrent state."""
_GOLDEN = 0.6180339887498949


class OutputLengths:
    """Estimated distribution of the job's output lengths.

    The distribution is a discrete hazard per output length: the number of sequences that stopped at
    the length, divided by the number of sequences that reached it (Kaplan & Meier 1958). Running
    sequences count as censored, so that sequences that end early do not bias the estimate. Each
    hazard is shrunk towards the overall stop rate, which is the only estimate for lengths that no
    sequence has reached yet.

    Args:
        longest: maximum number of output tokens of a sequence.
    """

    def __init__(self, longest: int) -> None:
        self._width = max(1, -(-longest // 2048))  # tokens per bin
        bins = -(-longest // self._width) + 1
        self._stopped = np.zeros(bins)
        self._reached = np.zeros(bins)
        self._edges = np.arange(bins + 1, dtype=np.float64) * self._width
        self._cumulative: Float | None = None

    def observe(self, lengths: Int, stopped: npt.NDArray[np.bool_]) -> None:
        """Count sequences that reached ``lengths`` output tokens; ``stopped`` is true for sequences
        that stopped at that length."""
        bins = len(self._stopped)
        at = np.minimum(lengths // self._width, bins - 1)
        self._reached += np.bincount(at, minlength=bins)
        if stopped.any():
            self._stopped += np.bincount(at[stopped], minlength=bins)
        self._cumulative = None

    def predict(self, ages: Int, limits: Int, quantiles: Float) -> Float:
        """Predict output lengths.

        Args:
            ages: output tokens of each sequence so far.
            limits: largest output length of each sequence.
            quantiles: quantile in (0, 1) of the conditional distribution to return for each
                sequence. If quantiles are spread evenly, the predictions of many sequences are
                distributed like their lengths.
        """
        hazard = self._cumulative_hazard()
        target = np.interp(ages, self._edges, hazard) - np.log1p(-quantiles)
        return np.clip(np.interp(target, hazard, self._edges), ages + 1, limits)

    def _cumulative_hazard(self) -> Float:
        if self._cumulative is None:
            overall = (self._stopped.sum() + 1.0) / (
                self._reached.sum() + len(self._reached) * self._width / _FIRST_GUESS
            )
            # Counts are per token, so the hazard of a bin is the sum over its tokens.
            hazard = (self._stopped + _SHRINK * overall) / (self._reached + _SHRINK)
            per_bin = -np.log1p(-np.minimum(hazard, 0.999)) * self._width
            self._cumulative = np.concatenate([[0.0], np.cumsum(per_bin)])
        return self._cumulative

    def remaining(self, table: SequenceTable, rows: Rows) -> Float:
        """Predict the number of further output tokens of running sequences, [S].

        A row's quantile is its admission number times the golden ratio, modulo 1, because such
        numbers spread evenly.
        """
        ages = table.num_tokens[rows] - table.num_prompt[rows]
        limits = table.max_total[rows] - table.num_prompt[rows]
        quantiles = np.asarray(table.admission[rows] * _GOLDEN + 0.5, dtype=np.float64) % 1.0
        totals = self.predict(ages, limits, quantiles)
        remaining: Float = np.where(table.length_known[rows], limits, totals) - ages
        return remaining


class PoolForecast:
    """Forecast of the blocks in use at later steps, if no further row is admitted.

    The forecast includes running sequences and the samples that will fork from them. Demand peaks
    just before a sequence ends. The search for the highest peak adds half a block, the average
    waste, to each table. The blocks at that peak are then counted exactly, because sequences of
    equal length fill their last blocks at the same time. For a model with windows, the forecast
    counts slots, one per layer group, and assumes the maximum number of slots for a sequence that
    will outgrow a window.

    The forecast counts the slots of snapshots of recurrent state as used, whether the snapshots are
    kept or planned. Without a snapshot, each of its followers would compute the prompt again, which
    takes more time than another running row saves.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable, lengths: OutputLengths) -> None:
        self._table = table
        self._lengths = lengths
        self._full = sum(window == 0 for window in table.windows)
        self._one_slot_per_block = table.windows == (0,)
        self._most_in_windows = [most_in_window(w, table.block_size) for w in table.windows if w]
        rows = table.rows()
        shared_blocks = table.num_shared_blocks[rows]
        elsewhere = np.maximum(shared_blocks, table.num_evicted(table.num_computed[rows]))
        owned = int((table.num_blocks[rows] - elsewhere - table.tail_shared[rows]).sum())
        self._per_state = pool.states.slots_per_state
        owned += pool.states.num_used  # each row will have its own state
        self._num_followers = 0
        has_samples = (table.pending_forks[rows] > 0) & ~table.is_beam[rows]
        planned = table.num_branches[rows] + has_samples
        self._num_snapshots = pool.states.num_on_device + int(planned.sum())
        self._not_owned = max(pool.num_used - owned, 0)
        """Number of used blocks that are not owned by a single sequence, such as shared blocks."""
        unsure = 1.0 if len(rows) == 0 else 1.0 - table.length_known[rows].mean()
        if not table.windows:
            unsure = 0.0  # states do not grow
        self._capacity = pool.num_blocks * (1.0 - _WATERMARK * unsure)
        forks = table.pending_forks[rows]
        remaining, tokens = lengths.remaining(table, rows), table.num_tokens[rows]
        full_blocks = table.num_prompt[rows] // table.block_size
        ends = np.concatenate([remaining, np.repeat(remaining, forks)])
        known = np.concatenate([tokens, np.repeat(tokens, forks)])
        shared = np.concatenate([shared_blocks, np.repeat(full_blocks, forks)])
        order = np.argsort(ends)
        self._ends: Float = ends[order]
        """Predicted number of remaining output tokens of each sequence, ascending."""
        self._tokens: Float = known[order].astype(np.float64)
        """Number of known tokens of each sequence. The newest token has no KV yet."""
        self._shared_blocks: Float = shared[order].astype(np.float64)
        """Number of each sequence's shared blocks, which are not freed when it ends."""

    def admit(self, sequence: Sequence, shared_blocks: int) -> bool:
        """Add a waiting sequence if it fits; return true if it does.

        Args:
            shared_blocks: number of the sequence's blocks that other sequences use.
        """
        return self._admit(sequence.num_tokens, self._remaining(sequence), shared_blocks)

    def admit_group(self, sequence: Sequence, shared_blocks: int, num_snapshots: int = 0) -> bool:
        """Add a waiting sequence and its group if they fit; return true if they do.

        Args:
            num_snapshots: number of snapshots that the sequence will keep, minus the snapshots that
                the sequence takes over.
        """
        before = self._ends, self._tokens, self._shared_blocks, self._num_snapshots
        self._num_snapshots += num_snapshots
        shared = sequence.request.num_prompt_tokens // self._table.block_size
        blocks = [shared_blocks, *[shared] * (sequence.request.group_size - 1)]
        remaining = self._remaining(sequence)
        if all(self._admit(sequence.num_tokens, remaining, count) for count in blocks):
            return True
        self._ends, self._tokens, self._shared_blocks, self._num_snapshots = before
        return False

    def expect_follower(self) -> None:
        """Reserve a recurrent state for a row that waits one step for a snapshot."""
        self._num_followers += 1

    def expect_samples(self, leader: Sequence) -> None:
        """Add samples that will fork from a row just admitted, until one does not fit."""
        if leader.output_ids:
            return
        remaining = self._remaining(leader)
        full_blocks = leader.num_tokens // self._table.block_size
        for _ in range(leader.request.num_draws - 1):
            if not self._admit(leader.num_tokens, remaining, full_blocks):
                break

    def _admit(self, tokens: int, remaining: float, shared_blocks: int) -> bool:
        at = int(np.searchsorted(self._ends, remaining))
        ends = np.insert(self._ends, at, remaining)
        known = np.insert(self._tokens, at, tokens)
        shared = np.insert(self._shared_blocks, at, shared_blocks)
        kept = min(self._num_snapshots * self._per_state, _MOST_SNAPSHOTS * self._capacity)
        kept += self._num_followers * self._per_state
        if self._not_owned + kept + self._peak(ends, known, shared) > self._capacity:
            return False
        self._ends, self._tokens, self._shared_blocks = ends, known, shared
        return True

    def _remaining(self, sequence: Sequence) -> float:
        """Predict the number of further output tokens of a waiting sequence: the median for its
        present output length."""
        age = len(sequence.output_ids)
        limit = self._table.total_limit(sequence) - sequence.request.num_prompt_tokens
        if not sequence.request.stop_token_ids and sequence.stop_checker is None:
            return float(limit - age)
        total = self._lengths.predict(np.array([age]), np.array([limit]), np.array([0.5]))
        return float(total[0]) - age

    def _peak(self, ends: Float, tokens: Float, shared_blocks: Float) -> float:
        """Return the peak number of unshared blocks of sequences, which are sorted by ``ends``."""
        size = self._table.block_size
        half = (tokens + (size - 1) / 2) / size - shared_blocks + self._per_state
        growth: Float = np.arange(len(ends), 0, -1, dtype=np.float64)
        if not self._one_slot_per_block:
            growing, constant = self._growing(ends, tokens, shared_blocks)
            constant += self._per_state * (1 - growing)  # a state counts once, not per group
            half, growth = half * growing + constant, np.cumsum(growing[::-1])[::-1]
        held = np.cumsum(half[::-1])[::-1] + growth * ends / size
        top = int(held.argmax())
        exact = np.ceil((tokens[top:] + ends[top] - 1) / size) - shared_blocks[top:]
        exact += self._per_state
        if not self._one_slot_per_block:
            exact = exact * growing[top:] + constant[top:]
        return float(exact.sum())

    def _growing(self, ends: Float, tokens: Float, shared_blocks: Float) -> tuple[Float, Float]:
        """Return the number of layer groups in which each sequence grows until it ends, and its
        constant number of blocks in the other groups."""
        growing, constant = np.full(len(ends), float(self._full)), np.zeros(len(ends))
        final = np.ceil((tokens + ends - 1) / self._table.block_size) - shared_blocks
        for most in self._most_in_windows:
            growing += final <= most
            constant += np.where(final <= most, 0, most)
        return growing, constant
