"""Recurrent layers of all kinds, for tests of their kernels and for the compile report."""

from __future__ import annotations

import math
from typing import Any

import torch

from batchinfer.kernels.causal_conv import CausalConvWeights
from batchinfer.kernels.gated_delta import GatedDeltaWeights
from batchinfer.kernels.mamba1 import Mamba1Weights
from batchinfer.kernels.mamba2 import Mamba2Weights
from tests.engine.kv.recurrent_configs import (
    gated_delta_config,
    mamba1_config,
    mamba2_config,
    short_conv_config,
)
from tests.kernels.recurrent_layer import RecurrentLayer


def gated_delta_layer(
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
    """Return a Gated DeltaNet layer with random weights and inputs. With ``by_row`` it is a Kimi
    Delta Attention layer."""
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


def mamba2_layer(
    lengths: list[int],
    *,
    groups: int = 2,
    heads: int = 4,
    width: int = 16,
    state_size: int = 8,
    conv_width: int = 4,
    slot_bytes: int = 8192,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> RecurrentLayer:
    """Return a Mamba-2 layer with random weights and inputs; ``options`` replace some weights."""
    text = mamba2_config(
        num_layers=3,
        heads=heads,
        width=width,
        groups=groups,
        state_size=state_size,
        conv_width=conv_width,
    )
    layer = RecurrentLayer(text, lengths, slot_bytes=slot_bytes, dtype=dtype, seed=seed)
    channels, values = layer.shape.num_channels, layer.shape.num_values
    parts: dict[str, Any] = {
        "conv_bias": layer.draw(channels).float(),
        "norm": layer.draw(values).float(),
        "gate_first": True,
        "dt_limits": (0.0, math.inf),
    }
    layer.weights = Mamba2Weights(
        conv=layer.draw(conv_width, channels).float(),
        decay_rate=layer.draw(heads).float().exp(),
        dt_bias=layer.draw(heads).float(),
        skip=layer.draw(heads).float(),
        norm_eps=1e-6,
        norm_width=values // groups,
        num_groups=groups,
        state_size=state_size,
        **(parts | options),
    )
    layer.draw_inputs(channels, values, heads)
    return layer


def mamba1_layer(
    lengths: list[int],
    *,
    channels: int,
    state_size: int = 8,
    slot_bytes: int = 8192,
    dtype: torch.dtype = torch.float32,
) -> RecurrentLayer:
    """Return a Mamba-1 layer with random weights, and inputs after the convolution."""
    text = mamba1_config(num_layers=3, channels=channels, state_size=state_size)
    layer = RecurrentLayer(text, lengths, slot_bytes=slot_bytes, dtype=dtype)
    layer.weights = Mamba1Weights(
        decay_rate=layer.draw(state_size, channels).float().exp(),
        skip=layer.draw(channels).float(),
    )
    layer.draw_inputs(channels, channels, state_size, state_size, channels)
    return layer


def causal_conv_layer(
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
    """Return a convolution with random weights and inputs."""
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
