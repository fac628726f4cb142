"""Splits a step's samples into groups, each of which is drawn in one call.

D = number of distributions in a group. Samples that draw from the same row of logits with the same
parameters share a distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchinfer.engine.step import Bool, Int64, SamplingBatch


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples in ascending order. Samples that share a distribution are adjacent."""

    samples: Int64  # [k] index into the batch's K samples
    starts: Int64  # [D + 1] start of each distribution's samples in ``samples``, then the end

    @property
    def heads(self) -> Int64:
        """First sample of each distribution, [D]."""
        return self.samples[self.starts[:-1]]

    @property
    def distributions(self) -> Int64:
        """Index of the distribution that each sample draws from, [k]."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def group_samples(
    batch: SamplingBatch, edited: Bool, chosen: Bool, max_distributions: int
) -> Iterator[SampleGroup]:
    """Split the ``chosen`` [K] samples into groups of at most ``max_distributions``.

    Samples whose logits are ``edited`` [K] do not share distributions.
    """
    samples = np.flatnonzero(chosen)
    if len(samples) == 0:
        return
    same = ~edited[samples[1:]] & ~edited[samples[:-1]]
    for name in ("logits_rows", *batch.DISTRIBUTION):
        values = getattr(batch, name)[samples]
        same &= values[1:] == values[:-1]
    bounds = np.concatenate([[0], np.flatnonzero(~same) + 1, [len(samples)]])
    for low in range(0, len(bounds) - 1, max_distributions):
        starts = bounds[low : low + max_distributions + 1]
        yield SampleGroup(samples[starts[0] : starts[-1]], starts - starts[0])


def is_filtered(batch: SamplingBatch, vocab: int) -> Bool:
    """Return bool [K], True where top-k or top-p can exclude some of ``vocab`` tokens."""
    filtered: Bool = ((batch.top_k > 0) & (batch.top_k < vocab)) | (batch.top_p < 1)
    return filtered
