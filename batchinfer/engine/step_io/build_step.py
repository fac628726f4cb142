"""Builds a step's arrays from a schedule, and its sampling batch from the sequence table."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchinfer.engine.images import StepImage, images_of_chunk, query_ends, rotary_positions
from batchinfer.engine.kv.pending_blocks import Pairs
from batchinfer.engine.request import Request
from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.sequence_table import Rows, SequenceTable
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step import (
    Int32,
    Int64,
    Penalties,
    ProcessedRow,
    SamplingBatch,
    ScoredTokens,
    SharedPrefixes,
    Step,
    StepEmbeds,
)
from batchinfer.engine.step_io.in_flight import SampledRows, snapshot_rows
from batchinfer.engine.step_io.ngrams import repeating_tokens
from batchinfer.engine.step_io.scored_prompts import ScoredSpan, scored_spans, scored_tokens
from batchinfer.engine.step_io.shared_prefix import PrefixTree
from batchinfer.engine.step_io.structured_output import grammar_masks


@dataclass(frozen=True, slots=True)
class BuiltStep:
    step: Step
    sampled: SampledRows
    scored: list[ScoredSpan]


def build_step(
    table: SequenceTable, schedule: Schedule, prefixes: PrefixTree | None = None
) -> BuiltStep:
    """Build the step for a schedule. Call it before ``num_computed`` includes the step's tokens.

    Args:
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
    longest = -(-int(context_lens.max()) // size) if table.windows else 0
    other_groups: dict[str, Any] = {}
    if len(table.windows) > 1:
        other_groups["other_tables"] = table.other_tables[:, rows, :longest]
        slots = table.other_tables[:, at_row, at_block]
        other_groups["other_slots"] = _token_slots(slots, positions, size)
    rotary, grid_positions = _rotary_positions(table, schedule, starts, positions)
    adapters = table.adapter[rows]
    logits_indices = (starts[1:] - 1)[schedule.finishes]
    pooled = logits_indices[table.pools[schedule.sampled]]
    return Step(
        token_ids=_token_ids(table, schedule, starts),
        previous_sample=_previous_sample(table, schedule, starts),
        positions=rotary,
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
        images=tuple(_images(table, schedule, starts)),
        prompt_embeds=tuple(_prompt_embeds(table, schedule, starts)),
        grid_positions=grid_positions,
        query_ends=_query_ends(table, schedule, starts, positions),
        prompt_lens=table.num_prompt[rows],
        **other_groups,
    )


def _token_slots(slots: Int32, positions: Int32, block_size: int) -> Int64:
    return slots.astype(np.int64) * block_size + positions % block_size


def _pairs(pairs: Pairs) -> Int32:
    return np.asarray(pairs, dtype=np.int32).reshape(-1, 2)


def _previous_sample(table: SequenceTable, schedule: Schedule, starts: Int32) -> Int32:
    """Return [T]: the previous step's sample that supplies each token; -1 if the token is known."""
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


def _prompt_chunks(
    table: SequenceTable, schedule: Schedule, starts: Int32
) -> Iterator[tuple[Request, int, int, int]]:
    """Yield the request of each sequence whose prompt is not computed yet, the positions [start,
    stop) that the step computes, and the index of the first of them among the packed tokens."""
    computed = table.num_computed[schedule.rows]
    for at in np.flatnonzero(computed < table.num_prompt[schedule.rows]):
        start = int(computed[at])
        stop = start + int(schedule.num_new[at])
        yield table.sequence(schedule.rows[at]).request, start, stop, int(starts[at])


def _images(table: SequenceTable, schedule: Schedule, starts: Int32) -> Iterator[StepImage]:
    for request, start, stop, first in _prompt_chunks(table, schedule, starts):
        yield from images_of_chunk(request.images, start, stop, first)


def _prompt_embeds(table: SequenceTable, schedule: Schedule, starts: Int32) -> Iterator[StepEmbeds]:
    """Yield the step's tokens that are given as embeddings."""
    for request, start, stop, first in _prompt_chunks(table, schedule, starts):
        if request.prompt_embeds is not None:
            yield StepEmbeds(first, request.prompt_embeds[start:stop])


def _rotary_positions(
    table: SequenceTable, schedule: Schedule, starts: Int32, positions: Int32
) -> tuple[Int32, Int32 | None]:
    """Return the rotary positions of the step's tokens, [T] and, if it has tokens of images with
    grids, [3, T].

    Args:
        positions: indices of the tokens in their sequences, [T].
    """
    rows, num_new = schedule.rows, schedule.num_new
    has_grids = table.has_grids[rows]
    if not has_grids.any():
        return positions, None
    computed = table.num_computed[rows]
    rotary = np.tile(positions + np.repeat(table.rotary_shift[rows], num_new), (3, 1))
    for at in np.flatnonzero(has_grids & (computed < table.num_prompt[rows])):
        start = int(computed[at])
        images = table.sequence(rows[at]).request.images
        rotary[:, starts[at] : starts[at + 1]] = rotary_positions(
            images, start, start + int(num_new[at])
        )
    are_equal = bool((rotary[0] == rotary[1:]).all())
    return rotary[0], None if are_equal else rotary


def _query_ends(
    table: SequenceTable, schedule: Schedule, starts: Int32, positions: Int32
) -> Int32 | None:
    """Return the exclusive end of the positions that each token of the step attends to, [T]; None
    if every token attends only up to itself."""
    rows = schedule.rows
    computed = table.num_computed[rows]
    ends = positions + np.int32(1)
    for at in np.flatnonzero(table.has_whole_images[rows] & (computed < table.num_prompt[rows])):
        start = int(computed[at])
        ends[starts[at] : starts[at + 1]] = query_ends(
            table.sequence(rows[at]).request.images, start, start + int(schedule.num_new[at])
        )
    return ends if (ends != positions + 1).any() else None


def build_sampling_batch(table: SequenceTable, schedule: Schedule) -> SamplingBatch:
    """Build the sampling batch of a scheduled step.

    The samples of a table row are consecutive; their ``sample_index`` counts up from the row's.
    """
    rows, samples_per_row = schedule.sampled, schedule.samples_per_row
    logits_rows = np.repeat(np.arange(len(rows), dtype=np.int32), samples_per_row)
    sample_rows = np.repeat(rows, samples_per_row)
    first = np.cumsum(samples_per_row) - samples_per_row
    nth = np.arange(len(sample_rows), dtype=np.int32) - np.repeat(first, samples_per_row)
    edited = np.flatnonzero(table.edits_logits[sample_rows])
    sequences = [table.sequence(sample_rows[at]) for at in edited]
    columns = table.sampling.take(sample_rows)
    columns["sample_index"] += nth
    position = (table.num_tokens[sample_rows] - table.num_prompt[sample_rows]).astype(np.int32)
    given_token_ids = table.given_token[sample_rows]
    modes = table.logprobs_mode[sample_rows]
    bias, allowed = _Entries(), _Entries()
    for at, sequence in zip(edited.tolist(), sequences, strict=True):
        _add_biases(sequence, int(position[at]), at, bias)
        allowed.add(at, sequence.request.params.allowed_token_ids or ())
    masked_rows, masks = grammar_masks(table, rows)
    return SamplingBatch(
        **columns,
        logits_rows=logits_rows,
        position=position,
        penalties=_penalties(edited.tolist(), sequences),
        bias_samples=np.asarray(bias.samples, dtype=np.int32),
        bias_token_ids=np.asarray(bias.token_ids, dtype=np.int32),
        bias_values=np.asarray(bias.values, dtype=np.float32),
        allowed_samples=np.asarray(allowed.samples, dtype=np.int32),
        allowed_token_ids=np.asarray(allowed.token_ids, dtype=np.int32),
        given_token_ids=given_token_ids if (given_token_ids >= 0).any() else None,
        masked_rows=masked_rows,
        masks=masks,
        processed=tuple(_processed_rows(table, rows)),
        named_token_ids=_named_tokens(table, sample_rows),
        logprobs_modes=modes if modes.any() else None,
    )


def _named_tokens(table: SequenceTable, sample_rows: Rows) -> Int32 | None:
    """Return each sample's named token ids [K, W], padded with -1."""
    naming = table.names_tokens[sample_rows]
    if not naming.any():
        return None
    return _padded(
        [
            list(table.sequence(row).request.named_token_ids) if names else []
            for row, names in zip(sample_rows, naming, strict=True)
        ]
    )


def _processed_rows(table: SequenceTable, rows: Rows) -> Iterator[ProcessedRow]:
    for at in np.flatnonzero(table.has_processors[rows]).tolist():
        sequence = table.sequence(rows[at])
        request = sequence.request
        prompt = request.prompt_token_ids
        yield ProcessedRow(
            at,
            request.logits_processors,
            prompt[prompt >= 0].tolist(),  # the tokens of images have negative ids
            list(sequence.output_ids),
        )


class _Entries:
    """Entries of a sparse matrix: (sample, token id, value)."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.token_ids: list[int] = []
        self.values: list[float] = []

    def add(self, sample: int, token_ids: Items[int], values: Items[float] = ()) -> None:
        self.samples.extend([sample] * len(token_ids))
        self.token_ids.extend(token_ids)
        self.values.extend(values)


def _add_biases(sequence: Sequence, position: int, sample: int, bias: _Entries) -> None:
    """Add a sample's logit biases. Ban last tokens of bad words and of repeated n-grams, and stop
    tokens if the output has fewer than ``min_tokens`` tokens."""
    request, params = sequence.request, sequence.request.params
    if params.logit_bias:
        bias.add(sample, list(params.logit_bias), list(params.logit_bias.values()))
    banned = {
        word[-1]
        for word in request.bad_words_token_ids
        if _ends_with(sequence.output_ids, word[:-1])
    }
    if size := params.no_repeat_ngram_size:
        banned |= repeating_tokens(request.prompt_token_ids, sequence.output_ids, size)
    # If there is a grammar, its mask already bans stop tokens.
    if position < params.min_tokens and request.grammar is None:
        banned.update(request.stop_token_ids)
    bias.add(sample, sorted(banned), [-np.inf] * len(banned))


def _ends_with(token_ids: list[int], ending: tuple[int, ...]) -> bool:
    return not ending or tuple(token_ids[-len(ending) :]) == ending


def _penalties(samples: list[int], sequences: list[Sequence]) -> Penalties | None:
    penalized = [
        (at, sequence)
        for at, sequence in zip(samples, sequences, strict=True)
        if sequence.request.params.has_penalties
    ]
    if not penalized:
        return None
    return Penalties(
        samples=np.asarray([at for at, _ in penalized], dtype=np.int32),
        prompt_token_ids=_padded([s.request.prompt_token_ids for _, s in penalized]),
        output_token_ids=_padded([s.output_ids for _, s in penalized]),
    )


def _padded(rows: Items[Int32 | list[int]]) -> Int32:
    """Return token ids [rows, longest], padded with -1."""
    padded = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int32)
    for row, token_ids in zip(padded, rows, strict=True):
        row[: len(token_ids)] = token_ids
    return np.maximum(padded, -1)  # the tokens of images have other negative ids
