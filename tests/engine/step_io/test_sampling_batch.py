"""Sampling parameters reach the samples of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batchinfer.engine.step import SamplingBatch, SamplingColumns
from tests.engine.fake import make_engine, make_request

PARAMS = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "n": 3},
    {"top_k": 7, "presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 2.0},
]


def first_batch(*keys: tuple[int, int]) -> SamplingBatch:
    """Return the batch of the step that draws the first tokens of rows with each of ``PARAMS``."""
    engine, runner = make_engine(64)
    for row, (params, key) in enumerate(zip(PARAMS, keys, strict=True)):
        engine.add_request(replace(make_request(row, [row + 1], **params), rng_key=key))
    engine.step()
    (step,) = runner.steps
    return step.sampling


def test_every_sample_has_its_rows_parameters() -> None:
    batch = first_batch((2**64 - 1, 5), (0, 6), (3, 2**64 - 1))
    assert batch.logits_rows.tolist() == [0, 1, 1, 1, 2]
    assert batch.temperature.tolist() == [0, 0.5, 0.5, 0.5, 1]
    assert batch.top_p.tolist() == [1, 0.25, 0.25, 0.25, 1]
    assert batch.top_k.tolist() == [0, 0, 0, 0, 7]
    assert batch.min_p.tolist() == [0, 0.125, 0.125, 0.125, 0]
    assert batch.presence_penalty.tolist() == [0, 0, 0, 0, 0.5]
    assert batch.frequency_penalty.tolist() == [0, 0, 0, 0, -1.5]
    assert batch.repetition_penalty.tolist() == [1, 1, 1, 1, 2]
    assert batch.seed.tolist() == [2**64 - 1, 0, 0, 0, 3]
    assert batch.stream.tolist() == [5, 6, 6, 6, 2**64 - 1]
    assert batch.sample_index.tolist() == [0, 0, 1, 2, 0]
    assert batch.num_logprobs.tolist() == [3, -1, -1, -1, -1]
    assert batch.position.tolist() == [0] * 5


def test_columns_keep_their_dtypes() -> None:
    columns, taken = SamplingColumns.zeros(4), SamplingColumns.zeros(4).take(np.arange(2))
    batch = first_batch((0, 0), (0, 1), (0, 2))
    for name, values in taken.items():
        assert values.dtype == getattr(columns, name).dtype == getattr(batch, name).dtype, name


def test_a_row_without_a_value_for_a_column_is_refused() -> None:
    with pytest.raises(AttributeError, match="temperature"):
        SamplingColumns.zeros(1).set_row(0, object())
