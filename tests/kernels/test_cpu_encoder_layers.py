"""Encoder layers in C: equal to float64 up to rounding, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from batchinfer.kernels.cpu import encoder_layers
from tests.kernels.encoder_cases import (
    ENCODER_CASES,
    EncoderCase,
    EncoderLayers,
    check_bits_of_a_sequence,
    check_encoder_layers,
)

pytestmark = pytest.mark.skipif(
    not encoder_layers.supports(torch.float32), reason="no C compiler here"
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("case", ENCODER_CASES, ids=str)
def test_layers_equal_those_in_float64(case: EncoderCase, dtype: torch.dtype) -> None:
    check_encoder_layers(case, dtype)


@dtypes
def test_a_sequence_has_the_same_bits_in_any_company(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits_of_a_sequence(dtype, monkeypatch)


@dtypes
def test_a_sequence_that_is_not_finite_spoils_no_other(dtype: torch.dtype) -> None:
    case = ENCODER_CASES[1]
    layers = EncoderLayers(case, dtype)
    expected = layers.run(layers.hidden, case.lengths)
    spoilt = layers.hidden.clone()
    spoilt[3] = torch.nan
    found = layers.run(spoilt, case.lengths)
    first = case.lengths[0]
    assert found[:first].isnan().all()
    assert torch.equal(found[first:], expected[first:])
