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

    @property
    def num_tokens(self) -> int:
        """T, the tokens computed."""
        return len(self.token_ids)

    def runs(self) -> list[tuple[int, int, int]]:
        """Neighbours of equal length, as (first packed token, sequences, length of each)."""
        changes = np.flatnonzero(np.diff(self.lengths)) + 1
        edges = [0, *changes.tolist(), len(self.lengths)]
        starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        return [
            (int(starts[first]), last - first, int(self.lengths[first]))
            for first, last in pairwise(edges)
        ]


class EncoderRunner(Protocol):
    """Computes steps of whole sequences: the worker, or a stand-in."""

    def encode(self, step: EncoderStep) -> Float32:
        """Vectors [S, D] of a step's sequences.

        Raises:
            OutOfMemory: there is none for it.
        """
        ...
