"""The kernels of a causal convolution equal their reference; steps and neighbors change no bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.causal_conv import CausalConvWeights
from batchinfer.kernels.causal_conv import causal_conv as reference
from batchinfer.kernels.cpu.causal_conv import causal_conv
from batchinfer.kernels.cpu.recurrent_state import supports
from batchinfer.kernels.recurrent_conv import causal_conv as triton_kernel
from tests.engine.kv.recurrent_configs import short_conv_config
from tests.kernels.gpu_or_interpreter import on_both
from tests.kernels.recurrent_layer import Cuts, RecurrentLayer, cuts_of_sequences

needs_compiler = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


def make_layer(
    lengths: list[int],
    *,
    channels: int,
    conv_width: int = 3,
    slot_bytes: int = 8192,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = True,
    silu: bool = False,
    gated: bool = True,
) -> RecurrentLayer:
    text = short_conv_config(num_layers=3, channels=channels, conv_width=conv_width)
    layer = RecurrentLayer(text, lengths, slot_bytes=slot_bytes, dtype=dtype)
    layer.output_width = channels
    layer.weights = CausalConvWeights(
        conv=layer.draw(conv_width, channels).float(),
        bias=layer.draw(channels).float() if has_bias else None,
        silu=silu,
    )
    layer.draw_inputs(*[channels] * (3 if gated else 1))
    return layer


@needs_compiler
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
    layer = make_layer(
        lengths,
        channels=channels,
        conv_width=conv_width,
        slot_bytes=slot_bytes,
        dtype=dtype,
        **options,
    )
    layer.assert_equal(causal_conv, reference)


@needs_compiler
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
    layer = make_layer(lengths, channels=channels, dtype=dtype, silu=silu, gated=gated)
    layer.assert_same_bits(causal_conv, cuts)


@on_both()
@pytest.mark.parametrize(
    "options", [{}, {"has_bias": False, "silu": True}, {"gated": False}], ids=["all", "no", "plain"]
)
def test_triton_kernel_equals_reference(
    options: dict[str, bool], dtype: torch.dtype, device: str
) -> None:
    layer = make_layer([5, 1, 3], channels=75, dtype=dtype, **options)
    layer.assert_equal(triton_kernel, reference, device)
