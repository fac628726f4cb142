"""Which samples end with the tokens that a step drew for them."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.constrained import Ends, add_forced_tokens
from batchinfer.engine.in_flight import Drawn
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.step import StepResult
from batchinfer.engine.table import SequenceTable
from batchinfer.protocols import StopMatch


def find_ends(
    table: SequenceTable, samples: Drawn, sequences: list[Sequence], result: StepResult
) -> Ends:
    """Which of K samples end, with the token drawn or with one that it forces.

    Args:
        table: the running sequences.
        samples: [K] what they were drawn for.
        sequences: [K] these, with the tokens drawn; gets those that are forced.
        result: the tokens.
    """
    ends = Ends(_stops(samples, sequences, result), samples.at_limit.copy(), samples.lengths.copy())
    if samples.has_grammar.any():
        add_forced_tokens(table, samples, sequences, result, ends)
    return ends


def _stops(
    samples: Drawn, sequences: list[Sequence], result: StepResult
) -> dict[int, int | StopMatch]:
    """The samples that end by choice with this token: the stop token or stop string that did it."""
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
