"""The schedule of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.kv.pending_blocks import BlockCopies
from batchinfer.engine.scheduler.sequence_table import Int, Rows, SequenceTable
from batchinfer.engine.step import Bool, Int32


@dataclass(slots=True)
class Schedule:
    """Rows and tokens that the next step computes; ``complete`` derives the rest."""

    rows: Rows
    """[S] table rows; those that compute one token first."""
    num_new: Int
    """[S] tokens each computes."""
    finishes: Bool = field(init=False)
    """[S] whether a row's last known token is computed, so that samples are drawn for it."""
    sampled: Rows = field(init=False)
    """[R] the rows that finish."""
    samples_per_row: Int32 = field(init=False)
    """[R] samples drawn from the logits of each."""
    block_copies: BlockCopies = field(init=False)
    num_preempted: int = 0
    num_cached: int = 0
    """Prompt tokens found in the index, of rows admitted for the first time."""

    def append(self, rows: list[int], num_new: list[int]) -> None:
        """Add rows and the tokens each computes."""
        self.rows = np.concatenate([self.rows, np.asarray(rows, dtype=np.intp)])
        self.num_new = np.concatenate([self.num_new, np.asarray(num_new, dtype=np.int32)])

    def complete(self, table: SequenceTable, copies: BlockCopies) -> None:
        """Put decodes first and derive which rows are sampled, when all rows are in.

        A row's first token is drawn for all its samples at once, from the same logits.
        """
        decodes_first = np.argsort(self.num_new != 1, kind="stable")
        rows, num_new = self.rows[decodes_first], self.num_new[decodes_first]
        self.rows, self.num_new, self.block_copies = rows, num_new, copies
        num_tokens = table.num_tokens[rows]
        self.finishes = table.num_computed[rows] + num_new == num_tokens
        self.sampled, num_tokens = rows[self.finishes], num_tokens[self.finishes]
        self.samples_per_row = np.ones(len(self.sampled), dtype=np.int32)
        for at in np.flatnonzero(num_tokens == table.num_prompt[self.sampled]):
            self.samples_per_row[at] = table.sequence(self.sampled[at]).request.num_draws
