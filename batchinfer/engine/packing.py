"""Forecasts for the sequences in the table: what admission goes by."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.forecast import Forecast, OutputLengths
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.table import Rows, SequenceTable

_WATERMARK = 0.01
"""Share of the pool that admission leaves free, where no output length is known for sure."""
_GOLDEN = 0.6180339887498949


class Packing:
    """Makes forecasts of the pool from the running sequences and from what the job has shown.

    Args:
        pool: the KV pool's blocks.
        table: the running sequences.
    """

    def __init__(self, pool: BlockPool, table: SequenceTable) -> None:
        self._pool = pool
        self._table = table
        self.lengths = OutputLengths(table.max_model_len)

    def forecast(self) -> Forecast:
        """The pool's future with what runs now, and with the samples that will fork from it."""
        table = self._table
        rows = table.rows()
        joined = table.num_joined[rows]
        elsewhere = np.maximum(joined, table.num_left(table.num_computed[rows]))
        owned = int((table.num_blocks[rows] - elsewhere - table.tail_shared[rows]).sum())
        unsure = 1.0 if len(rows) == 0 else 1.0 - table.length_known[rows].mean()
        remaining = self._remaining_of_rows(rows)
        unborn = table.unborn[rows]
        full_blocks = np.repeat(table.num_prompt[rows] // table.block_size, unborn)
        return Forecast(
            np.concatenate([table.num_tokens[rows], np.repeat(table.num_tokens[rows], unborn)]),
            np.concatenate([remaining, np.repeat(remaining, unborn)]),
            np.concatenate([joined, full_blocks]),
            shared_blocks=max(self._pool.num_used - owned, 0),
            capacity=self._pool.num_blocks * (1.0 - _WATERMARK * unsure),
            block_size=table.block_size,
            windows=table.windows,
        )

    def admit(self, forecast: Forecast, sequence: Sequence, joined: int) -> bool:
        """Whether a waiting sequence fits, and its gang with it; if so they count from now on."""
        tokens, remaining = sequence.num_tokens, self.remaining(sequence)
        shared = sequence.request.num_prompt_tokens // self._table.block_size
        others = [(tokens, remaining, shared)] * (sequence.request.gang_size - 1)
        return forecast.admit_together([(tokens, remaining, joined), *others])

    def expect_samples(self, forecast: Forecast, leader: Sequence) -> None:
        """Count on the samples that will fork from a row just admitted, as far as they fit."""
        if leader.output_ids:
            return
        remaining, full_blocks = self.remaining(leader), leader.num_tokens // self._table.block_size
        for _ in range(leader.request.num_draws - 1):
            if not forecast.admit(leader.num_tokens, remaining, full_blocks):
                break

    def _remaining_of_rows(self, rows: Rows) -> npt.NDArray[np.float64]:
        table = self._table
        ages = table.num_tokens[rows] - table.num_prompt[rows]
        limits = table.max_total[rows] - table.num_prompt[rows]
        quantiles = np.asarray(table.admission[rows] * _GOLDEN + 0.5, dtype=np.float64) % 1.0
        totals = self.lengths.predict(ages, limits, quantiles)
        remaining: npt.NDArray[np.float64]
        remaining = np.where(table.length_known[rows], limits, totals) - ages
        return remaining

    def remaining(self, sequence: Sequence) -> float:
        """Output tokens a waiting sequence is taken to add: an average one of its age."""
        age = len(sequence.output_ids)
        limit = self._table.total_limit(sequence) - sequence.request.num_prompt_tokens
        if not sequence.request.stop_token_ids and sequence.stop_checker is None:
            return float(limit - age)
        total = self.lengths.predict(np.array([age]), np.array([limit]), np.array([0.5]))
        return float(total[0]) - age
