"""Samples that are worked on together: each once, no more at a time than there is room for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.worker.sampling.groups import group_samples
from batchinfer.worker.sampling.logits_processors import edited_samples
from tests.worker.sampling.sampling_batches import Sample, make_batch

samples = st.builds(
    Sample,
    row=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 2]),
    bias=st.sampled_from([{}, {1: 2.0}]),
)


@given(st.lists(samples, min_size=1, max_size=20), st.integers(1, 5), st.booleans())
def test_every_sample_but_the_plain_is_in_one_part(
    asked: list[Sample], most: int, in_place: bool
) -> None:
    batch = make_batch(sorted(asked, key=lambda sample: sample.row))
    edited = edited_samples(batch)
    parts = list(group_samples(batch, edited, 10, most, in_place=in_place))
    worked_on = sorted(at for part in parts for at in part.samples.tolist())
    assert worked_on == np.flatnonzero((batch.temperature > 0) | edited).tolist()
    for part in parts:
        assert part.in_place == (in_place and not part.greedy and not edited[part.samples].any())
        assert part.in_place or len(part.heads) <= most
        rows = batch.logits_rows[part.heads][part.distributions]
        assert rows.tolist() == batch.logits_rows[part.samples].tolist()
    assert sum(part.in_place for part in parts) <= 1
