"""Triton kernels of recurrent layers match their references.

A token's bits do not depend on how its sequence is cut into steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.kernels import causal_conv, gated_delta, mamba1, mamba2, recurrence, recurrent_conv
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.recurrent_cases import (
    causal_conv_layer,
    gated_delta_layer,
    mamba1_layer,
    mamba2_layer,
)


@on_both()
@pytest.mark.parametrize(
    "options", [{}, {"has_bias": False, "silu": True}, {"gated": False}], ids=["all", "no", "plain"]
)
def test_causal_conv_equals_reference(
    options: dict[str, bool], dtype: torch.dtype, device: str
) -> None:
    layer = causal_conv_layer([5, 1, 3], channels=75, dtype=dtype, **options)
    layer.assert_equal(recurrent_conv.causal_conv, causal_conv.causal_conv, device)


@on_both()
@pytest.mark.parametrize(("value_width", "by_row"), [(16, False), (24, True), (128, False)])
def test_gated_delta_equals_reference(
    value_width: int, by_row: bool, dtype: torch.dtype, device: str
) -> None:
    layer = gated_delta_layer(
        [5, 1, 3], value_width=value_width, key_width=7, by_row=by_row, dtype=dtype
    )
    layer.assert_equal(recurrence.gated_delta, gated_delta.gated_delta, device)


@on_both()
def test_gated_delta_continues_from_states(dtype: torch.dtype, device: str) -> None:
    layer = gated_delta_layer([7, 2, 6], value_width=48, dtype=dtype)
    layer.assert_same_bits(recurrence.gated_delta, [[0, 3, 4, 7], [0, 1, 2], [0, 6]], device)


@on_both()
@pytest.mark.parametrize(
    "options",
    [{}, {"conv_bias": None}, {"norm": None, "gate_first": False}, {"dt_limits": (0.5, 1.0)}],
    ids=["plain", "no_bias", "no_norm", "limits"],
)
def test_mamba2_equals_reference(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    layer = mamba2_layer([5, 1, 3], width=48, state_size=7, dtype=dtype, **options)
    layer.assert_equal(recurrence.mamba2, mamba2.mamba2, device)


@on_both()
def test_mamba2_continues_from_states(dtype: torch.dtype, device: str) -> None:
    layer = mamba2_layer([7, 2, 6], width=24, dtype=dtype)
    layer.assert_same_bits(recurrence.mamba2, [[0, 3, 4, 7], [0, 1, 2], [0, 6]], device)


@on_both()
@pytest.mark.parametrize("channels", [7, 48])
def test_mamba1_equals_reference(channels: int, dtype: torch.dtype, device: str) -> None:
    layer = mamba1_layer([5, 1, 3], channels=channels, state_size=7, dtype=dtype)
    layer.assert_equal(recurrence.mamba1, mamba1.mamba1, device)


@on_both()
def test_mamba1_continues_from_states(dtype: torch.dtype, device: str) -> None:
    layer = mamba1_layer([7, 2, 6], channels=40, dtype=dtype)
    layer.assert_same_bits(recurrence.mamba1, [[0, 3, 4, 7], [0, 1, 2], [0, 6]], device)
