"""The kernels of Gated DeltaNet and Kimi Delta Attention equal their reference; steps and neighbors
change no bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu.gated_delta import gated_delta
from batchinfer.kernels.cpu.recurrent_state import MAX_CONV_WIDTH, supports
from batchinfer.kernels.gated_delta import gated_delta as reference
from batchinfer.kernels.recurrence import gated_delta as triton_kernel
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.recurrent_cases import gated_delta_layer
from tests.kernels.recurrent_layer import Cuts, cuts_of_sequences

needs_compiler = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


@needs_compiler
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    key_heads=st.sampled_from([1, 2, 3]),
    heads_per_key=st.sampled_from([1, 2, 3]),
    key_width=st.sampled_from([1, 4, 7, 16]),
    value_width=st.sampled_from([3, 8, 16, 48, 64]),
    conv_width=st.sampled_from([2, 3, 4, MAX_CONV_WIDTH]),
    by_row=st.booleans(),
    slot_bytes=st.sampled_from([4096, 8192, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_c_kernel_equals_reference(
    lengths: list[int], key_heads: int, heads_per_key: int, dtype: torch.dtype, **sizes: int
) -> None:
    layer = gated_delta_layer(
        lengths, key_heads=key_heads, value_heads=key_heads * heads_per_key, dtype=dtype, **sizes
    )
    layer.assert_equal(gated_delta, reference)


@needs_compiler
@given(
    cuts=cuts_of_sequences,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    value_width=st.sampled_from([16, 24, 128]),
    by_row=st.booleans(),
)
def test_bits_do_not_depend_on_steps_and_neighbors(
    cuts: Cuts, dtype: torch.dtype, value_width: int, by_row: bool
) -> None:
    lengths = [ends[-1] for ends in cuts]
    layer = gated_delta_layer(lengths, value_width=value_width, by_row=by_row, dtype=dtype)
    layer.assert_same_bits(gated_delta, cuts)


def test_wide_convolutions_are_left_to_the_reference() -> None:
    assert supports(torch.float32, MAX_CONV_WIDTH)
    assert not supports(torch.float32, MAX_CONV_WIDTH + 1)


@on_both()
@pytest.mark.parametrize(("value_width", "by_row"), [(16, False), (24, True), (128, False)])
def test_triton_kernel_equals_reference(
    value_width: int, by_row: bool, dtype: torch.dtype, device: str
) -> None:
    layer = gated_delta_layer(
        [5, 1, 3], value_width=value_width, key_width=7, by_row=by_row, dtype=dtype
    )
    layer.assert_equal(triton_kernel, reference, device)


@on_both()
def test_triton_kernel_continues_from_states(dtype: torch.dtype, device: str) -> None:
    layer = gated_delta_layer([7, 2, 6], value_width=48, dtype=dtype)
    layer.assert_same_bits(triton_kernel, [[0, 3, 4, 7], [0, 1, 2], [0, 6]], device)
