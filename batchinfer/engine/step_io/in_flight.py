"""Steps in flight: submitted steps whose results have not been read."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from batchinfer.engine.runner import Pending
from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.sequence_table import Rows, SequenceTable
from batchinfer.engine.stats import StepStats
from batchinfer.engine.step import Bool, Int32, Int64
from batchinfer.engine.step_io.scored_prompts import ScoredSpan


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Columns of the R rows that a step samples, at the time of submission.

    By the time the samples are known, the next step may be in flight, and a sequence's table row
    may have been freed.
    """

    rows: Rows
    admission: Int64  # tells whether the sequence still has its table row
    sequences: npt.NDArray[np.object_]  # ``Sequence`` objects
    samples_per_row: Int32  # number of samples drawn from the row's logits
    num_tokens: Int32  # number of tokens, including the token drawn
    lengths: Int32  # number of output tokens, including the token drawn
    is_first: Bool  # true if this is the request's first token
    at_limit: Bool  # true if this token reaches the sequence's length limit
    may_stop: Bool  # true if the output has at least min_tokens
    stop_ids: Int32  # [R, longest list] padded with -1
    checks_stops: Bool
    num_logprobs: Int32
    is_beam: Bool
    scores_prompt: Bool
    pools: Bool  # true if the result has the row's hidden state
    has_grammar: Bool

    def only(self, chosen: Bool | Rows) -> SampledRows:
        return SampledRows(*(getattr(self, entry.name)[chosen] for entry in fields(self)))


@dataclass(frozen=True, slots=True)
class InFlight:
    pending: Pending
    sampled: SampledRows
    scored: list[ScoredSpan]
    stats: StepStats
    """Statistics without times."""
    began: float
    """Time on the engine's clock when scheduling began, in seconds."""


def snapshot_rows(table: SequenceTable, schedule: Schedule) -> SampledRows:
    """Return the rows that a step samples. Call it before ``num_computed`` includes the step."""
    rows = schedule.sampled
    num_tokens = table.num_tokens[rows] + np.int32(1)
    lengths = num_tokens - table.num_prompt[rows]
    return SampledRows(
        rows=rows,
        admission=table.admission[rows],
        sequences=table.sequences[rows],
        samples_per_row=schedule.samples_per_row,
        num_tokens=num_tokens,
        lengths=lengths,
        is_first=table.awaits_first_token[rows],
        at_limit=num_tokens >= table.max_total[rows],
        may_stop=lengths >= table.min_tokens[rows],
        stop_ids=table.stop_ids[rows],
        checks_stops=table.checks_stops[rows],
        num_logprobs=table.sampling.num_logprobs[rows],
        is_beam=table.is_beam[rows],
        scores_prompt=table.scores_prompt[rows],
        pools=table.pools[rows],
        has_grammar=table.has_grammar[rows],
    )
