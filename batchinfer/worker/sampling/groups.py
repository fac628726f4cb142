"""Groups of samples that are worked on together, made on the host from the batch alone.

D = distributions in a group: samples that draw from the same row of logits with the same
parameters share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchinfer.engine.step import Bool, Int64, SamplingBatch


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples of the same kind of work, few enough for the workspace if they take one."""

    samples: Int64  # [k] index into the batch's K samples
    distributions: Int64  # [k] which of the D each draws from, ascending
    heads: Int64  # [D] the first sample of each distribution
    greedy: bool
    """Whether the samples take the most likely token."""
    filtered: bool
    """Whether any has top-k or top-p; False where they are drawn in place."""
    in_place: bool
    """Whether they are drawn from the logits where these are, without a workspace."""


def group_samples(
    batch: SamplingBatch, edited: Bool, vocab: int, max_distributions: int, *, in_place: bool
) -> Iterator[SampleGroup]:
    """Groups that together hold every sample but the plain.

    The plain ones take the most likely token of an unedited row, which needs no work.

    Args:
        batch: the samples.
        edited: [K] from ``edited_samples``.
        vocab: tokens.
        max_distributions: most in a group that needs a workspace.
        in_place: whether others than the edited are drawn without one.
    """
    greedy = batch.temperature == 0
    filtered = ((batch.top_k > 0) & (batch.top_k < vocab)) | (batch.top_p < 1)
    drawn_in_place = ~greedy & ~edited & in_place
    needs_workspace = ~greedy & ~drawn_in_place
    kinds = (
        (greedy & edited, True, False, False),
        (drawn_in_place, False, False, True),
        (needs_workspace & ~filtered, False, False, False),
        (needs_workspace & filtered, False, True, False),
    )
    for chosen, is_greedy, is_filtered, is_in_place in kinds:
        samples = np.flatnonzero(chosen)
        if len(samples) == 0:
            continue
        first = starts_distribution(batch, edited, samples)
        distributions = np.cumsum(first) - 1
        count = int(first.sum())
        size = count if is_in_place else max_distributions
        for low in range(0, count, size):
            start, stop = np.searchsorted(distributions, (low, low + size))
            chunk = slice(int(start), int(stop))
            yield SampleGroup(
                samples=samples[chunk],
                distributions=distributions[chunk] - low,
                heads=samples[chunk][first[chunk]],
                greedy=is_greedy,
                filtered=is_filtered,
                in_place=is_in_place,
            )


def starts_distribution(batch: SamplingBatch, edited: Bool, samples: Int64) -> Bool:
    """[k] whether a sample's distribution differs from that of the one before it."""
    first = np.ones(len(samples), np.bool_)
    same = ~edited[samples[1:]] & ~edited[samples[:-1]]
    for name in ("logits_rows", *batch.DISTRIBUTION):
        values = getattr(batch, name)[samples]
        same &= values[1:] == values[:-1]
    first[1:] = ~same
    return first
