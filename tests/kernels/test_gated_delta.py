"""The C kernel of Gated DeltaNet and Kimi Delta Attention equals its reference; steps and neighbors
change no bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.kernels.cpu.gated_delta import gated_delta
from batchinfer.kernels.cpu.recurrent_state import MAX_CONV_WIDTH, supports
from batchinfer.kernels.gated_delta import GatedDeltaWeights
from batchinfer.kernels.gated_delta import gated_delta as reference
from tests.engine.kv.recurrent_configs import gated_delta_config
from tests.kernels.recurrent_layer import Cuts, RecurrentLayer, cuts_of_sequences

pytestmark = pytest.mark.skipif(
    not supports(torch.float32), reason="the C kernels cannot be compiled"
)


def make_layer(
    lengths: list[int],
    *,
    key_heads: int = 2,
    value_heads: int = 4,
    key_width: int = 8,
    value_width: int = 16,
    conv_width: int = 4,
    by_row: bool = False,
    slot_bytes: int = 8192,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> RecurrentLayer:
    text = gated_delta_config(
        num_layers=3,
        key_heads=key_heads,
        value_heads=value_heads,
        key_width=key_width,
        value_width=value_width,
        conv_width=conv_width,
    )
    layer = RecurrentLayer(text, lengths, slot_bytes=slot_bytes, dtype=dtype, seed=seed)
    shape, decays = layer.shape, value_heads * (key_width if by_row else 1)
    layer.weights = GatedDeltaWeights(
        conv=layer.draw(conv_width, shape.num_channels).float(),
        decay_rate=layer.draw(value_heads).float().exp(),
        dt_bias=layer.draw(decays).float(),
        norm=layer.draw(value_width).float(),
        norm_eps=1e-6,
        max_beta=1.0,
        num_key_heads=key_heads,
        key_width=key_width,
        with_silu=not by_row,
    )
    layer.draw_inputs(shape.num_channels, shape.num_values, decays, value_heads)
    return layer


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
def test_equals_reference(
    lengths: list[int], key_heads: int, heads_per_key: int, dtype: torch.dtype, **sizes: int
) -> None:
    layer = make_layer(
        lengths, key_heads=key_heads, value_heads=key_heads * heads_per_key, dtype=dtype, **sizes
    )
    layer.assert_equal(gated_delta, reference)


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
    layer = make_layer(lengths, value_width=value_width, by_row=by_row, dtype=dtype)
    layer.assert_same_bits(gated_delta, cuts)


def test_wide_convolutions_are_left_to_the_reference() -> None:
    assert supports(torch.float32, MAX_CONV_WIDTH)
    assert not supports(torch.float32, MAX_CONV_WIDTH + 1)
