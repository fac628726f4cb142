"""The C kernel of Gated DeltaNet and Kimi Delta Attention matches its reference.

A token's bits depend neither on how its sequence is cut into steps nor on other sequences.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu.gated_delta import gated_delta
from batchinfer.kernels.cpu.recurrent_state import MAX_CONV_WIDTH, supports
from batchinfer.kernels.gated_delta import gated_delta as reference
from tests.kernels.recurrent_cases import gated_delta_layer
from tests.kernels.recurrent_layer import Cuts
from tests.kernels.step_cuts import cuts_of_sequences

pytestmark = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


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


@given(
    cuts=cuts_of_sequences,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    key_width=st.sampled_from([1, 7, 8]),
    value_width=st.sampled_from([16, 24, 72, 200]),
    by_row=st.booleans(),
)
def test_bits_do_not_depend_on_steps_and_neighbors(
    cuts: Cuts, dtype: torch.dtype, key_width: int, value_width: int, by_row: bool
) -> None:
    lengths = [ends[-1] for ends in cuts]
    layer = gated_delta_layer(
        lengths, key_width=key_width, value_width=value_width, by_row=by_row, dtype=dtype
    )
    layer.assert_same_bits(gated_delta, cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_size_of_slots(dtype: torch.dtype) -> None:
    small, large = (
        gated_delta_layer([9, 1, 14], key_width=1, slot_bytes=size, dtype=dtype)
        for size in (128, 65536)
    )
    large.weights, large.inputs = small.weights, small.inputs
    assert torch.equal(small.run(gated_delta), large.run(gated_delta))


def test_steps_without_tokens_change_nothing() -> None:
    layer = gated_delta_layer([3, 2])
    whole = layer.run(gated_delta)
    assert torch.equal(layer.run(gated_delta, [[0, 3, 3], [0, 2, 2]]), whole)


def test_wide_convolutions_are_left_to_the_reference() -> None:
    assert supports(torch.float32, MAX_CONV_WIDTH)
    assert not supports(torch.float32, MAX_CONV_WIDTH + 1)
