"""Samples report log-probabilities of chosen ids, in the mode that the row asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchinfer.engine.step import LogprobsMode, StepResult
from batchinfer.worker.sampling.sampler import Sampler
from tests.worker.sampling.sampling_batches import Sample, make_batch

VOCAB = 1003
RAW, LOGITS, PROCESSED = LogprobsMode.RAW, LogprobsMode.LOGITS, LogprobsMode.PROCESSED
EDITED = LogprobsMode.EDITED


def normal(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def report(
    logits: torch.Tensor,
    samples: Sequence[Sample],
    named: list[list[int]] | None = None,
    modes: list[LogprobsMode] | None = None,
) -> StepResult:
    batch = dataclasses.replace(
        make_batch(samples),
        named_token_ids=None if named is None else np.array(named, dtype=np.int32),
        logprobs_modes=None if modes is None else np.array(modes, dtype=np.int32),
    )
    return Sampler()(logits.clone(), batch).result()


@pytest.mark.parametrize("token_id", [-2, VOCAB])
def test_a_named_token_the_model_does_not_have_is_a_bug(token_id: int) -> None:
    with pytest.raises(IndexError, match="not in the model"):
        report(normal(1), [Sample(logprobs=0)], [[token_id]])


def test_named_ids_are_reported_next_to_the_most_likely() -> None:
    logits = normal(2)
    samples = [Sample(row=0, logprobs=2), Sample(row=1, logprobs=0), Sample(row=1)]
    named = [[5, 900, 5], [77, -1, -1], [-1, -1, -1]]
    result, plain = report(logits, samples, named), report(logits, samples)
    own = logits.log_softmax(1).numpy()
    assert result.named_logprobs[0] == pytest.approx(own[0, [5, 900, 5]], abs=1e-5)
    assert result.named_logprobs[1, 0] == pytest.approx(own[1, 77], abs=1e-5)
    assert np.isneginf(result.named_logprobs[1:, 1:]).all(), "unused places are padded"
    for name in ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(plain, name))
    assert plain.named_logprobs is None
    assert result.only(np.array([True, False, False])).named_logprobs is not None


def test_each_sample_has_its_mode() -> None:
    """Processed values equal those of transformers; the token is the same in all modes."""
    logits, seen = normal(1), [3, 4, 5, 6]
    sample = Sample(
        temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition=1.3, output=seen, logprobs=50
    )
    modes = [RAW, LOGITS, PROCESSED, PROCESSED | LOGITS]
    result = report(logits, [sample] * 4, [[3, 1002]] * 4, modes)
    warpers = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            MinPLogitsWarper(0.01),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
        ]
    )
    processed = warpers(torch.tensor([seen]), logits.clone())
    expected = [logits.log_softmax(1), logits, processed.log_softmax(1), processed]
    token = int(result.token_ids[0])
    assert set(result.token_ids.tolist()) == {token}
    for at, own in enumerate(values[0] for values in expected):
        assert result.logprobs[at] == pytest.approx(float(own[token]), abs=1e-4)
        ids = torch.from_numpy(result.top_token_ids[at].astype(np.int64))
        np.testing.assert_allclose(result.top_logprobs[at], own[ids], atol=1e-4)
        np.testing.assert_allclose(result.top_logprobs[at], own.topk(50).values, atol=1e-4)
        np.testing.assert_allclose(result.named_logprobs[at], own[[3, 1002]], atol=1e-4)
        assert result.ranks[at] == 1 + int((own > own[token]).sum())
    assert np.isneginf(result.top_logprobs[2]).any(), "some tokens were filtered out"


def test_processed_values_of_greedy_samples_have_biases_and_no_temperature() -> None:
    logits = normal(3)
    logits[2, 7] = torch.nan
    samples = [
        Sample(row=0, temperature=0, bias={9: 50.0}, logprobs=1),
        Sample(row=1, temperature=0, allowed=[4, 5], top_k=1, logprobs=2),
        Sample(row=2, temperature=0, logprobs=0),
    ]
    result = report(logits, samples, modes=[PROCESSED | LOGITS, PROCESSED, LOGITS])
    assert result.token_ids[0] == 9
    assert result.logprobs[0] == pytest.approx(float(logits[0, 9]) + 50, abs=1e-4)
    two = logits[1, [4, 5]].log_softmax(0)
    np.testing.assert_allclose(result.top_logprobs[1], two.sort(descending=True).values, atol=1e-5)
    assert result.nonfinite.tolist() == [False, False, True]
    assert result.logprobs[2] == 0


def test_edited_values_are_not_normalized_again() -> None:
    logits, seen = normal(3), [3, 4, 5, 6]
    samples = [
        Sample(row=0, temperature=0, bias={9: 50.0, 5: -np.inf}, logprobs=2),
        Sample(row=1, temperature=0, repetition=1.5, frequency=0.5, output=seen, logprobs=VOCAB),
        Sample(row=2, temperature=0, logprobs=3),
        Sample(row=1, temperature=0, bias=dict.fromkeys(range(VOCAB), -np.inf), logprobs=1),
    ]
    result = report(logits, samples, [[5], [5], [5], [5]], modes=[EDITED] * 4)
    plain = report(logits, samples[2:3])
    own = logits.log_softmax(1)
    assert result.top_token_ids[0, 0] == 9
    assert result.top_logprobs[0, 0] == pytest.approx(float(own[0, 9]) + 50, abs=1e-4)
    assert result.top_logprobs[0, 1] == pytest.approx(float(own[0].max()), abs=1e-4)
    assert np.isneginf(result.named_logprobs[0])
    penalized = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([seen]), own[1:2].clone())[0]
    penalized[seen] -= 0.5
    np.testing.assert_allclose(
        result.top_logprobs[1], penalized.sort(descending=True).values, atol=1e-4
    )
    np.testing.assert_array_equal(result.top_logprobs[2, :3], plain.top_logprobs[0])
    assert result.no_token_left.tolist() == [False, False, False, True]
    assert np.isneginf(result.top_logprobs[3, 0])


def test_values_do_not_depend_on_the_rows_per_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = normal(5)
    samples = [Sample(row=row, top_p=0.8, stream=row, logprobs=3) for row in range(5)]
    modes = [PROCESSED, RAW, PROCESSED, PROCESSED, LOGITS]
    named = [[row] for row in range(5)]
    whole = report(logits, samples, named, modes)
    module = "batchinfer.worker.sampling.sampler"
    monkeypatch.setattr(f"{module}.workspace_rows", lambda vocab, device: 2)
    parts = report(logits, samples, named, modes)
    for name in ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))
