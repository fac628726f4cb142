"""What the next step computes, as the scheduler says it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.kv.pending_blocks import BlockCopies
from batchinfer.engine.scheduler.sequence_table import Int, Rows


@dataclass(slots=True)
class Schedule:
    """What the next step computes."""

    rows: Rows
    """[S] table rows; those that compute one token first."""
    num_new: Int
    """[S] tokens each computes."""
    block_copies: BlockCopies = field(default_factory=BlockCopies)
    num_preempted: int = 0
    num_cached: int = 0
    """Prompt tokens found in the index, of rows admitted for the first time."""

    def append(self, rows: list[int], num_new: list[int]) -> None:
        """Let further rows compute as many tokens."""
        self.rows = np.concatenate([self.rows, np.asarray(rows, dtype=np.intp)])
        self.num_new = np.concatenate([self.num_new, np.asarray(num_new, dtype=np.int32)])
