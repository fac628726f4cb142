"""Encoder layers in C: equal to float64 up to rounding, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from batchinfer.kernels.cpu import encoder_layers, gemm
from batchinfer.kernels.low_bit import Int4Weight, Int8Weight, LowBitWeight
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
@pytest.mark.parametrize("rounded", [Int8Weight.rounded, partial(Int4Weight.rounded, group_size=8)])
def test_weights_of_few_bits_are_multiplied_within_tasks(
    rounded: Callable[[torch.Tensor], LowBitWeight],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task rounds all of its rows itself, though other threads compute theirs."""
    check_bits_of_a_sequence(dtype, monkeypatch, lambda weight: gemm.pack_low_bit(rounded(weight)))


@dtypes
def test_scores_that_overflow_leave_no_number(dtype: torch.dtype) -> None:
    """As softmax has it, also where all that a token sees is -inf."""
    case = EncoderCase("", 1, 16, 32, 48, (1,) * 12)
    layers = EncoderLayers(case, dtype)
    assert layers.run(layers.hidden * 1e25, case.lengths).isnan().all()


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
