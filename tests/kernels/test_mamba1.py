"""The kernels of Mamba-1's scan equal their reference; steps and neighbors change no bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu.mamba1 import mamba1
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.kernels.mamba1 import mamba1 as reference
from batchinfer.kernels.recurrence import mamba1 as triton_kernel
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.recurrent_cases import mamba1_layer
from tests.kernels.recurrent_layer import Cuts, cuts_of_sequences

needs_compiler = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


@needs_compiler
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    channels=st.sampled_from([1, 7, 16, 64, 75, 192]),
    state_size=st.sampled_from([1, 4, 7, 16]),
    slot_bytes=st.sampled_from([512, 4096, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_c_kernel_equals_reference(lengths: list[int], dtype: torch.dtype, **sizes: int) -> None:
    mamba1_layer(lengths, dtype=dtype, **sizes).assert_equal(mamba1, reference)


@needs_compiler
@pytest.mark.parametrize("dt", [-100.0, -1.0, 0.0, 1.0, 19.0, 21.0, 100.0])
def test_time_steps_of_all_sizes(dt: float) -> None:
    layer = mamba1_layer([3, 2], channels=40)
    layer.inputs[1].fill_(dt)
    layer.assert_equal(mamba1, reference)


@needs_compiler
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


@on_both()
@pytest.mark.parametrize("channels", [7, 48])
def test_triton_kernel_equals_reference(channels: int, dtype: torch.dtype, device: str) -> None:
    layer = mamba1_layer([5, 1, 3], channels=channels, state_size=7, dtype=dtype)
    layer.assert_equal(triton_kernel, reference, device)


@on_both()
def test_triton_kernel_continues_from_states(dtype: torch.dtype, device: str) -> None:
    layer = mamba1_layer([7, 2, 6], channels=40, dtype=dtype)
    layer.assert_same_bits(triton_kernel, [[0, 3, 4, 7], [0, 1, 2], [0, 6]], device)
