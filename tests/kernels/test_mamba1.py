"""The C kernel of Mamba-1's scan matches its reference.

A token's bits depend neither on how its sequence is cut into steps nor on other sequences.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu.mamba1 import mamba1
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.kernels.mamba1 import mamba1 as reference
from tests.kernels.recurrent_cases import mamba1_layer
from tests.kernels.recurrent_layer import Cuts
from tests.kernels.step_cuts import cuts_of_sequences

pytestmark = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    channels=st.sampled_from([1, 7, 16, 64, 75, 192]),
    state_size=st.sampled_from([1, 4, 7, 16]),
    slot_bytes=st.sampled_from([512, 4096, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_c_kernel_equals_reference(lengths: list[int], dtype: torch.dtype, **sizes: int) -> None:
    mamba1_layer(lengths, dtype=dtype, **sizes).assert_equal(mamba1, reference)


@pytest.mark.parametrize("dt", [-100.0, -1.0, 0.0, 1.0, 19.0, 21.0, 100.0])
def test_time_steps_of_all_sizes(dt: float) -> None:
    layer = mamba1_layer([3, 2], channels=40)
    layer.inputs[1].fill_(dt)
    layer.assert_equal(mamba1, reference)


@given(
    cuts=cuts_of_sequences,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    channels=st.sampled_from([24, 160]),
)
def test_bits_do_not_depend_on_steps_and_neighbors(
    cuts: Cuts, dtype: torch.dtype, channels: int
) -> None:
    layer = mamba1_layer([ends[-1] for ends in cuts], channels=channels, dtype=dtype)
    layer.assert_same_bits(mamba1, cuts)
