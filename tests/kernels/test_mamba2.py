"""The C kernel of Mamba-2 matches its reference.

A token's bits depend neither on how its sequence is cut into steps nor on other sequences.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu.mamba2 import mamba2
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.kernels.mamba2 import mamba2 as reference
from tests.kernels.recurrent_cases import mamba2_layer
from tests.kernels.recurrent_layer import Cuts
from tests.kernels.step_cuts import cuts_of_sequences

pytestmark = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2, 3]),
    heads_per_group=st.sampled_from([1, 2, 3]),
    width=st.sampled_from([3, 8, 16, 48, 64]),
    state_size=st.sampled_from([1, 4, 7, 16]),
    conv_width=st.sampled_from([2, 4]),
    slot_bytes=st.sampled_from([4096, 8192, 65536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
    options=st.sampled_from(
        [{}, {"conv_bias": None}, {"norm": None, "gate_first": False}, {"gate_first": False}]
    ),
    dt_limits=st.sampled_from([(0.0, math.inf), (0.5, 1.0)]),
)
def test_c_kernel_equals_reference(
    lengths: list[int],
    groups: int,
    heads_per_group: int,
    dtype: torch.dtype,
    dt_limits: tuple[float, float],
    options: dict[str, Any],
    **sizes: int,
) -> None:
    layer = mamba2_layer(
        lengths,
        groups=groups,
        heads=groups * heads_per_group,
        dtype=dtype,
        dt_limits=dt_limits,
        **options,
        **sizes,
    )
    layer.assert_equal(mamba2, reference)


@given(
    cuts=cuts_of_sequences,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    width=st.sampled_from([16, 24, 128]),
)
def test_bits_do_not_depend_on_steps_and_neighbors(
    cuts: Cuts, dtype: torch.dtype, width: int
) -> None:
    layer = mamba2_layer([ends[-1] for ends in cuts], width=width, dtype=dtype)
    layer.assert_same_bits(mamba2, cuts)
