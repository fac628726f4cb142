"""Messages between the control plane and a worker that encodes whole texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from batchinfer.engine.step import Float32, Int32


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """Input of one forward pass over S whole sequences, packed into T tokens without padding.

    No sequence is empty.
    """

    token_ids: Int32  # [T]
    lengths: Int32  # [S] tokens of each sequence
    first_segments: Int32  # [S] tokens of each sequence's first text; the second text follows
    pooling: tuple[str, ...]
    """Pooling modes. Each mode gives one vector per sequence. The vectors are concatenated in the
    order of the modes."""
    unpooled: Int32 | None = None  # [S] number of leading tokens that pooling skips; None: all 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def runs(self) -> list[tuple[int, int, int]]:
        """Group adjacent sequences with equal ``lengths`` and ``unpooled`` into runs.

        Returns (index of the first packed token, number of sequences, tokens per sequence) for each
        run.
        """
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return [
            (int(starts[first]), last - first, int(self.lengths[first]))
            for first, last in pairwise(self._edges())
        ]

    def unpooled_of_runs(self) -> list[int]:
        """Return the number of leading tokens that pooling skips, for each run."""
        edges = self._edges()[:-1]
        return [0 if self.unpooled is None else int(self.unpooled[first]) for first in edges]

    def _edges(self) -> list[int]:
        differ = np.diff(self.lengths) != 0
        if self.unpooled is not None:
            differ |= np.diff(self.unpooled) != 0
        return [0, *(np.flatnonzero(differ) + 1).tolist(), len(self.lengths)]


class EncoderRunner(Protocol):
    """Encodes steps of whole texts. The worker and the dry run implement it."""

    def encode(self, step: EncoderStep) -> Float32:
        """Return vectors [S, D] of the step's sequences.

        Raises:
            OutOfMemory: there is not enough memory for the step.
        """
        ...
