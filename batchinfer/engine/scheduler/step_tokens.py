"""Counts the prefill, decode and recomputed tokens of a step."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.scheduler.schedule import Schedule
from batchinfer.engine.scheduler.sequence_table import SequenceTable


def note_tokens(table: SequenceTable, schedule: Schedule, now: float) -> tuple[int, int, int]:
    """Classify the tokens of a scheduled step, and update the statistics of its requests.

    Call it before ``num_computed`` includes the step's tokens.

    Returns:
        ``prefill_tokens``, ``decode_tokens`` and ``recomputed_tokens`` of ``StepStats``.
    """
    rows, num_new = schedule.rows, schedule.num_new
    start = table.num_computed[rows]
    again = np.clip(table.computed_once[rows] - start, 0, num_new)
    for at in np.flatnonzero(again):
        table.sequence(rows[at]).state.stats.recomputed_tokens += int(again[at])
    for at in np.flatnonzero(table.awaits_first_token[rows]):
        state = table.sequence(rows[at]).state
        if state.admitted_at is None:
            state.admitted_at = now
    first_output = np.maximum(table.num_prompt[rows], start + again)
    decode = int(np.clip(start + num_new - first_output, 0, None).sum())
    return int(num_new.sum()) - decode, decode, int(again.sum())
