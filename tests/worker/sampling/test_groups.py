"""Every sample is in one group, and each group fits into the workspace."""

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
    bias=st.sampled_from([{}, {1: 2.0}]),
)


@given(st.lists(samples, min_size=1, max_size=20), st.integers(1, 5))
def test_every_chosen_sample_is_in_one_group_with_those_of_its_row(
    asked: list[Sample], most: int
) -> None:
    batch = make_batch(sorted(asked, key=lambda sample: sample.row))
    edited, drawn = edited_samples(batch), batch.temperature > 0
    groups = list(group_samples(batch, edited, drawn, most))
    grouped = [at for group in groups for at in group.samples.tolist()]
    assert grouped == np.flatnonzero(drawn).tolist()
    for group in groups:
        assert 1 <= len(group.heads) <= most
        rows = batch.logits_rows[group.heads][group.distributions]
        assert rows.tolist() == batch.logits_rows[group.samples].tolist()
        assert len(group.heads) >= edited[group.samples].sum()
