"""Encoder layers in C match a float64 reference up to rounding, and a sequence's bits do not depend
on other sequences."""

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
def test_encoder_layers_equal_float64(case: EncoderCase, dtype: torch.dtype) -> None:
    check_encoder_layers(case, dtype)


@dtypes
def test_sequence_bits_do_not_depend_on_other_sequences(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits_of_a_sequence(dtype, monkeypatch)


@dtypes
@pytest.mark.parametrize("rounded", [Int8Weight.rounded, partial(Int4Weight.rounded, group_size=8)])
def test_low_bit_weights_give_the_same_bits_for_all_tasks(
    rounded: Callable[[torch.Tensor], LowBitWeight],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each task rounds its own rows while other threads compute."""
    check_bits_of_a_sequence(dtype, monkeypatch, lambda weight: gemm.pack_low_bit(rounded(weight)))


@dtypes
def test_overflowing_scores_give_nan(dtype: torch.dtype) -> None:
    case = EncoderCase("", 1, 16, 32, 48, (1,) * 12)
    layers = EncoderLayers(case, dtype)
    assert layers.run(layers.hidden * 1e25, case.lengths).isnan().all()


@dtypes
def test_nan_in_one_sequence_does_not_affect_other_sequences(dtype: torch.dtype) -> None:
    case = ENCODER_CASES[1]
    layers = EncoderLayers(case, dtype)
    expected = layers.run(layers.hidden, case.lengths)
    with_nan = layers.hidden.clone()
    with_nan[3] = torch.nan
    got = layers.run(with_nan, case.lengths)
    first = case.lengths[0]
    assert got[:first].isnan().all()
    assert torch.equal(got[first:], expected[first:])
