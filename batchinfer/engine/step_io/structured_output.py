"""Structured output: builds token masks of grammars, and appends tokens that grammars force."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.request import Request, TokenLogprobs
from batchinfer.engine.scheduler.sequence_table import Rows, SequenceTable
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step import Bool, Int32, LogprobsMode, StepResult
from batchinfer.engine.step_io.in_flight import SampledRows
from batchinfer.protocols import GrammarState, StopMatch


def grammar_masks(table: SequenceTable, rows: Rows) -> tuple[Int32, Int32]:
    """Return the token masks of the rows with a grammar, computed in one call.

    Args:
        rows: [R] the rows to sample.

    Returns:
        [M] indices of the rows with a grammar, and their masks [M, words] (see ``Grammar``). The
        first tokens of a row's samples share one mask.
    """
    places = np.flatnonzero(table.has_grammar[rows]).astype(np.int32)
    if len(places) == 0:
        return places, np.empty((0, 0), dtype=np.int32)
    sequences = [table.sequence(rows[at]) for at in places]
    grammar = sequences[0].request.grammar
    assert grammar is not None
    masks = grammar.masks([_state(sequence) for sequence in sequences])
    for mask, sequence in zip(masks, sequences, strict=True):
        if len(sequence.output_ids) < sequence.request.params.min_tokens:
            _forbid_ends(mask, sequence.request.stop_token_ids)
    return places, masks


def _forbid_ends(mask: Int32, stop_token_ids: Items[int]) -> None:
    """Remove stop tokens from a mask, unless it allows no other token."""
    remaining = mask.view(np.uint32).copy()
    for token_id in stop_token_ids:
        remaining[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if remaining.any():
        mask[:] = remaining.view(np.int32)


@dataclass(slots=True)
class StopResult:
    """Which of a step's K samples stop. ``add_forced_tokens`` updates the fields."""

    stops: dict[int, int | StopMatch]
    """Stop token or stop string of each sample that stops."""
    at_limit: Bool
    lengths: Int32
    broken: dict[int, str] = field(default_factory=dict)
    """Grammar errors by sample."""


def add_forced_tokens(
    table: SequenceTable,
    samples: SampledRows,
    sequences: list[Sequence],
    result: StepResult,
    stop_result: StopResult,
) -> None:
    """Advance grammars by the tokens drawn, and append tokens that the grammars force.

    The next step computes forced tokens as a chunk. Forced tokens have log-probability 0, because
    no other token was allowed.

    Args:
        samples: [K] the row of each sample.
        sequences: [K] sequences that include the drawn tokens.
        stop_result: receives new stops.
    """
    tokens, continues = (
        result.token_ids.tolist(),
        (~result.nonfinite & ~stop_result.at_limit).tolist(),
    )
    for at in np.flatnonzero(samples.has_grammar).tolist():
        sequence, token, forced = sequences[at], tokens[at], list[int]()
        state = _state(sequence)
        if continues[at] and token in sequence.request.eos_token_ids:
            # The sample stops even before min_tokens, because no other token was allowed.
            stop_result.stops[at] = token
        elif continues[at] and at not in stop_result.stops:
            forced = state.take(token)
        error = state.error  # from making the token's mask, or from taking the token
        if error is not None:
            stop_result.broken[at] = error
            stop_result.stops.pop(at, None)
        elif forced:
            _add(sequence, forced, at, stop_result, table)


def _add(
    sequence: Sequence, forced: list[int], at: int, stop_result: StopResult, table: SequenceTable
) -> None:
    """Append forced tokens to a sequence, up to a token that ends the sequence."""
    request, before = sequence.request, len(sequence.output_ids)
    max_output_tokens = table.total_limit(sequence) - request.num_prompt_tokens
    for token in forced:
        sequence.output_ids.append(token)
        if sequence.logprobs is not None:
            sequence.logprobs.append(_forced_logprobs(request, token))
        stop = _stop(sequence, token)
        stop_result.at_limit[at] = len(sequence.output_ids) == max_output_tokens
        if stop is not None:
            stop_result.stops[at] = stop
        if stop is not None or stop_result.at_limit[at]:
            break
    num_added = len(sequence.output_ids) - before
    stop_result.lengths[at] += num_added
    if sequence.row >= 0:
        table.num_tokens[sequence.row] += num_added
        table.last_token[sequence.row] = sequence.output_ids[-1]


def _forced_logprobs(request: Request, token: int) -> TokenLogprobs:
    """Return the log-probabilities of the only allowed token; NaN if logits are requested, because
    its logit is unknown."""
    logprob = math.nan if request.logprobs_mode & LogprobsMode.LOGITS else 0.0
    top = ((token, logprob),) if request.params.logprobs else ()
    named = tuple(
        (name, logprob if name == token else -math.inf) for name in request.named_token_ids
    )
    return TokenLogprobs(token, logprob, 1, top, named)


def _stop(sequence: Sequence, token: int) -> int | StopMatch | None:
    """Return the stop token or stop string that ends a sequence with its last token, if any."""
    request, checker = sequence.request, sequence.stop_checker
    if token in request.eos_token_ids:  # stops even before min_tokens, because the text is complete
        return token
    may_stop = len(sequence.output_ids) >= request.params.min_tokens
    if may_stop and token in request.params.stop_token_ids:
        return token
    return None if checker is None else checker.on_token(token, may_stop=may_stop)


def _state(sequence: Sequence) -> GrammarState:
    assert sequence.grammar_state is not None
    return sequence.grammar_state
