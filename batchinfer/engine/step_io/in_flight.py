"""Steps in flight: submitted, with results not read."""

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

    When the samples are known, the next step may be in flight and a sequence may have left its row.
    """

    rows: Rows
    admission: Int64  # shows whether the sequence is still in its row
    sequences: npt.NDArray[np.object_]  # of Sequence
    samples_per_row: Int32  # samples drawn from the row's logits
    num_tokens: Int32  # including the token drawn
    lengths: Int32  # output tokens, including the token drawn
    is_first: Bool  # the request's first token
    at_limit: Bool  # ends by length with this token
    may_stop: Bool  # has at least min_tokens
    stop_ids: Int32  # [R, most of any row] padded with -1
    checks_stops: Bool
    num_logprobs: Int32
    is_beam: Bool
    scores_prompt: Bool
    pools: Bool  # its hidden state is in the result
    has_grammar: Bool

    def only(self, chosen: Bool | Rows) -> SampledRows:
        """A subset of the rows, by mask or index."""
        return SampledRows(*(getattr(self, entry.name)[chosen] for entry in fields(self)))


@dataclass(frozen=True, slots=True)
class InFlight:
    """A submitted step whose result has not been read."""

    pending: Pending
    sampled: SampledRows
    scored: list[ScoredSpan]
    stats: StepStats
    """Without its times."""
    began: float
    """Start of its scheduling on the engine's clock."""


def snapshot_rows(table: SequenceTable, schedule: Schedule) -> SampledRows:
    """The rows that a step samples, before it counts as computed."""
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
