"""The C kernel of a causal convolution matches its reference.

A token's bits depend neither on how its sequence is cut into steps nor on other sequences.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.causal_conv import causal_conv as reference
from batchinfer.kernels.cpu.causal_conv import causal_conv
from batchinfer.kernels.cpu.recurrent_state import supports
from tests.kernels.recurrent_cases import causal_conv_layer
from tests.kernels.recurrent_layer import Cuts
from tests.kernels.step_cuts import cuts_of_sequences

pytestmark = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    channels=st.sampled_from([1, 7, 16, 64, 75, 192]),
    conv_width=st.sampled_from([2, 3, 4, 7, 16]),
    slot_bytes=st.sampled_from([512, 4096, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_bias=st.booleans(),
    silu=st.booleans(),
    gated=st.booleans(),
)
def test_c_kernel_equals_reference(
    lengths: list[int],
    channels: int,
    conv_width: int,
    slot_bytes: int,
    dtype: torch.dtype,
    **options: bool,
) -> None:
    layer = causal_conv_layer(
        lengths,
        channels=channels,
        conv_width=conv_width,
        slot_bytes=slot_bytes,
        dtype=dtype,
        **options,
    )
    layer.assert_equal(causal_conv, reference)


@given(
    cuts=cuts_of_sequences,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    channels=st.sampled_from([24, 160]),
    silu=st.booleans(),
    gated=st.booleans(),
)
def test_bits_do_not_depend_on_steps_and_neighbors(
    cuts: Cuts, dtype: torch.dtype, channels: int, silu: bool, gated: bool
) -> None:
    lengths = [ends[-1] for ends in cuts]
    layer = causal_conv_layer(lengths, channels=channels, dtype=dtype, silu=silu, gated=gated)
    layer.assert_same_bits(causal_conv, cuts)
