"""Builds a step's arrays from a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from batchinfer.engine.kv.pending_blocks import Pairs
from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.step import Int32, Int64, ScoredTokens, SharedPrefixes, Step
from batchinfer.engine.step_io.in_flight import SampledRows, snapshot_rows
from batchinfer.engine.step_io.sampling_batch import build_sampling_batch
from batchinfer.engine.step_io.scored_prompts import ScoredSpan, scored_spans, scored_tokens
from batchinfer.engine.step_io.shared_prefix import PrefixTree


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step for the runner, and the data needed to process its result."""

    step: Step
    sampled: SampledRows
    scored: list[ScoredSpan]


def build_step(
    table: SequenceTable, schedule: Schedule, prefixes: PrefixTree | None = None
) -> BuiltStep:
    """Build the step for a schedule. Call it before the step's tokens count as computed.

    Args:
        table: the sequence table.
        schedule: the rows and tokens of the step.
        prefixes: finds shared prefixes; None: attention does not use shared prefixes.
    """
    spans = scored_spans(table, schedule)
    shared = None if prefixes is None else prefixes.of_step(schedule.rows)
    step = _step(table, schedule, shared, scored_tokens(spans))
    return BuiltStep(step, snapshot_rows(table, schedule), spans)


def _step(
    table: SequenceTable,
    schedule: Schedule,
    shared_prefixes: SharedPrefixes | None,
    scored: ScoredTokens | None,
) -> Step:
    rows, num_new = schedule.rows, schedule.num_new
    starts = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    computed = table.num_computed[rows]
    within = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], num_new)
    positions = (np.repeat(computed, num_new) + within).astype(np.int32)
    size = table.block_size
    at_row, at_block = np.repeat(rows, num_new), positions // size
    context_lens = (computed + num_new).astype(np.int32)
    longest = -(-int(context_lens.max()) // size)
    other_groups: dict[str, Any] = {}
    if len(table.windows) > 1:
        other_groups["other_tables"] = table.other_tables[:, rows, :longest]
        slots = table.other_tables[:, at_row, at_block]
        other_groups["other_slots"] = _token_slots(slots, positions, size)
    adapters = table.adapter[rows]
    logits_indices = (starts[1:] - 1)[schedule.finishes]
    pooled = logits_indices[table.pools[schedule.sampled]]
    return Step(
        token_ids=_token_ids(table, schedule, starts),
        previous_sample=_previous_sample(table, schedule, starts),
        positions=positions,
        query_starts=starts,
        context_lens=context_lens,
        block_tables=table.block_table[rows, :longest],
        slot_mapping=_token_slots(table.block_table[at_row, at_block], positions, size),
        block_copies=_pairs(schedule.block_copies.within),
        logits_indices=logits_indices,
        sampling=build_sampling_batch(table, schedule),
        shared_prefixes=shared_prefixes,
        swap_outs=_pairs(schedule.block_copies.outs),
        swap_ins=_pairs(schedule.block_copies.ins),
        scored=scored,
        pooled=pooled if len(pooled) else None,
        adapters=adapters if adapters.any() else None,
        state_tables=table.state_table[rows],
        **other_groups,
    )


def _token_slots(slots: Int32, positions: Int32, block_size: int) -> Int64:
    """Return the indices of token slots in the pool."""
    return slots.astype(np.int64) * block_size + positions % block_size


def _pairs(pairs: Pairs) -> Int32:
    return np.asarray(pairs, dtype=np.int32).reshape(-1, 2)


def _previous_sample(table: SequenceTable, schedule: Schedule, starts: Int32) -> Int32:
    """Return the previous step's sample that is each token's value, [T]; -1 = a known value."""
    previous = np.full(starts[-1], -1, dtype=np.int32)
    previous[starts[:-1]] = table.sample_at[schedule.rows]
    return previous


def _token_ids(table: SequenceTable, schedule: Schedule, starts: Int32) -> Int32:
    """Return token ids [T]: each row's last token, or its next chunk of known tokens."""
    rows, num_new = schedule.rows, schedule.num_new
    token_ids = np.empty(starts[-1], dtype=np.int32)
    token_ids[starts[:-1]] = table.last_token[rows]
    computed = table.num_computed[rows]
    behind = table.num_tokens[rows] - computed > 1
    for at in np.flatnonzero(behind):
        start = int(computed[at])
        tokens = table.sequence(rows[at]).tokens(start, start + int(num_new[at]))
        token_ids[starts[at] : starts[at + 1]] = tokens
    return token_ids
