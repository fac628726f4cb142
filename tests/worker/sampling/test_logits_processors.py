"""Biases, allowed ids and penalties equal those of a simple reference and of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from batchinfer.worker.sampling.logits_processors import edit_logits
from batchinfer.worker.sampling.on_device import _edit_arrays
from tests.worker.sampling.sampling_batches import Sample, make_batch

VOCAB = 23
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def edited(logits: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    result = logits[[sample.row for sample in samples]].clone()
    edit_logits(result, make_batch(samples), np.arange(len(samples)))
    return result


def reference(row: npt.NDArray[np.float32], sample: Sample) -> npt.NDArray[Any]:
    """Process one sample token by token, in float64."""
    result = row.astype(np.float64)
    for token_id, value in sample.bias.items():
        result[token_id] += value
    if sample.allowed:
        result[[i for i in range(VOCAB) if i not in sample.allowed]] = -np.inf
    for token_id in set(sample.prompt) | set(sample.output):
        positive = result[token_id] > 0
        result[token_id] *= 1 / sample.repetition if positive else sample.repetition
    for token_id in set(sample.output):
        count = list(sample.output).count(token_id)
        result[token_id] -= sample.frequency * count + sample.presence
    return result


@given(
    st.lists(
        st.builds(
            Sample,
            row=st.integers(0, 2),
            presence=st.sampled_from([0.0, 0.5, -2.0]),
            frequency=st.sampled_from([0.0, 0.25, -1.0]),
            repetition=st.sampled_from([1.0, 1.3, 0.5]),
            prompt=IDS,
            output=IDS,
            bias=st.dictionaries(
                st.integers(0, VOCAB - 1), st.sampled_from([-np.inf, -3.0, 100.0]), max_size=4
            ),
            allowed=IDS,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_edits_of_a_sample_do_not_depend_on_other_samples(samples: list[Sample]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    for row, sample in zip(edited(logits, samples).numpy(), samples, strict=True):
        expected = reference(logits[sample.row].numpy(), sample)
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    prompt, output = [1, 2, 2, 7], [7, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([prompt + output]), logits.clone()
    )
    sample = Sample(repetition=1.7, prompt=prompt, output=output)
    torch.testing.assert_close(edited(logits, [sample]), expected)


def test_edits_of_other_groups_are_ignored() -> None:
    samples = [
        Sample(bias={1: 5.0}),
        Sample(allowed=[2]),
        Sample(presence=1.0, output=[3]),
        Sample(bias={4: 5.0}),
    ]
    result = torch.zeros(1, VOCAB)
    edit_logits(result, make_batch(samples), np.array([3]))
    assert result[0].nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_a_token_the_model_does_not_have_is_a_bug(token_id: int) -> None:
    with pytest.raises(IndexError, match="not in the model"):
        edited(torch.zeros(1, VOCAB), [Sample(bias={token_id: 1.0})])
    batch = make_batch([Sample(bias={token_id: 1.0})])
    with pytest.raises(IndexError, match="not in the model"):
        _edit_arrays(batch, np.array([0]), VOCAB)
