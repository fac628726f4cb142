"""The schedule of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.engine.kv.pending_blocks import BlockCopies
from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.step import Bool, Int32


@dataclass(frozen=True, slots=True)
class Schedule:
    """Table rows and number of tokens that the next step computes, and the rows to sample."""

    rows: Rows
    """[S] table rows; rows that compute one token come first."""
    num_new: Int
    """[S] tokens to compute per row."""
    finishes: Bool
    """[S] True where the step computes a row's last known token; the step samples such rows."""
    sampled: Rows
    samples_per_row: Int32
    """[R] samples drawn from each row's logits."""
    block_copies: BlockCopies
    num_preempted: int
    num_cached: int
    """Number of prompt tokens found in the prefix index at first admission."""


@dataclass(slots=True)
class ScheduledRows:
    """Rows chosen so far for the next step. The fields are as in ``Schedule``."""

    rows: Rows
    num_new: Int
    num_preempted: int
    num_cached: int = 0

    def append(self, rows: list[int], num_new: list[int]) -> None:
        self.rows = np.concatenate([self.rows, np.asarray(rows, dtype=np.intp)])
        self.num_new = np.concatenate([self.num_new, np.asarray(num_new, dtype=np.int32)])

    def schedule(self, table: SequenceTable, copies: BlockCopies) -> Schedule:
        """Return the schedule of these rows. All samples of a row draw their first token from
        the logits after its prompt."""
        decodes_first = np.argsort(self.num_new != 1, kind="stable")
        rows, num_new = self.rows[decodes_first], self.num_new[decodes_first]
        num_tokens = table.num_tokens[rows]
        finishes = table.num_computed[rows] + num_new == num_tokens
        sampled, num_tokens = rows[finishes], num_tokens[finishes]
        samples_per_row = np.ones(len(sampled), dtype=np.int32)
        for at in np.flatnonzero(num_tokens == table.num_prompt[sampled]):
            samples_per_row[at] = table.sequence(sampled[at]).request.num_draws
        return Schedule(
            rows,
            num_new,
            finishes,
            sampled,
            samples_per_row,
            copies,
            self.num_preempted,
            self.num_cached,
        )
