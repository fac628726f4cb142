"""Finds samples that stop: at a stop token, at a stop string, or where their grammar ends."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.scheduler.sequence_table import SequenceTable
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step import StepResult
from batchinfer.engine.step_io.in_flight import SampledRows
from batchinfer.engine.step_io.structured_output import StopResult, add_forced_tokens
from batchinfer.protocols import StopMatch


def find_stops(
    table: SequenceTable, samples: SampledRows, sequences: list[Sequence], result: StepResult
) -> StopResult:
    """Find which of K samples stop at the drawn token, or at tokens that a grammar then forces.

    Args:
        samples: [K] the row of each sample.
        sequences: [K] sequences that include the drawn tokens; forced tokens are appended to them.
    """
    stop_result = StopResult(
        _stops(samples, sequences, result), samples.at_limit.copy(), samples.lengths.copy()
    )
    if samples.has_grammar.any():
        add_forced_tokens(table, samples, sequences, result, stop_result)
    return stop_result


def _stops(
    samples: SampledRows, sequences: list[Sequence], result: StepResult
) -> dict[int, int | StopMatch]:
    """Return the stop token or stop string of each sample that stops with this token."""
    tokens, may_stop = result.token_ids, samples.may_stop
    by_token = (samples.stop_ids == tokens[:, None]).any(axis=1) & may_stop
    stops: dict[int, int | StopMatch] = {
        at: int(tokens[at]) for at in np.flatnonzero(by_token).tolist()
    }
    for at in np.flatnonzero(samples.checks_stops & ~by_token & ~result.nonfinite).tolist():
        checker = sequences[at].stop_checker
        assert checker is not None
        stop = checker.on_token(int(tokens[at]), may_stop=bool(may_stop[at]))
        if stop is not None:
            stops[at] = stop
    return stops
