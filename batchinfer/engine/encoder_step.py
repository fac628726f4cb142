"""The messages between the control plane and a worker that encodes whole texts. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from batchinfer.engine.step import Float32, Int32


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """The input of one forward pass over whole sequences, one after another in a packed row.

    S = sequences, T = tokens of all of them; no sequence is padded, and none is empty.
    """

    token_ids: Int32  # [T]
    lengths: Int32  # [S] tokens of each sequence
    first_segments: (
        Int32  # [S] tokens of each that are of its first text; the others are of a second
    )
    pooling: tuple[str, ...]
    """Modes by which hidden states become a vector, put side by side in this order."""
    unpooled: Int32 | None = None  # [S] first tokens of each that pooling leaves out; None: none

    @property
    def num_tokens(self) -> int:
        """T, the tokens computed."""
        return len(self.token_ids)

    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbours that are alike in length and in what is pooled, as (first packed token,
        sequences, length of each)."""
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return [
            (int(starts[first]), last - first, int(self.lengths[first]))
            for first, last in pairwise(self._edges())
        ]

    def unpooled_of_runs(self) -> list[int]:
        """First tokens of each run's sequences that pooling leaves out."""
        edges = self._edges()[:-1]
        return [0 if self.unpooled is None else int(self.unpooled[first]) for first in edges]

    def _edges(self) -> list[int]:
        differ = np.diff(self.lengths) != 0
        if self.unpooled is not None:
            differ |= np.diff(self.unpooled) != 0
        return [0, *(np.flatnonzero(differ) + 1).tolist(), len(self.lengths)]


class EncoderRunner(Protocol):
    """Computes steps of whole sequences: the worker, or a stand-in."""

    def encode(self, step: EncoderStep) -> Float32:
        """Vectors [S, D] of a step's sequences.

        Raises:
            OutOfMemory: there is none for it.
        """
        ...
