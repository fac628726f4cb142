"""Configs of models whose layers are all recurrent, for tests of their state."""

from __future__ import annotations

from typing import Any


def gated_delta_config(
    *,
    num_layers: int,
    key_heads: int,
    value_heads: int,
    key_width: int,
    value_width: int,
    conv_width: int,
) -> dict[str, Any]:
    """Return the keys of a Qwen3-Next config that determine the layout of its state."""
    return {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * num_layers,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_width,
        "linear_value_head_dim": value_width,
        "linear_conv_kernel_dim": conv_width,
    }


def mamba1_config(*, num_layers: int, channels: int, state_size: int) -> dict[str, Any]:
    """Return the keys of a Mamba config that determine the layout of its state."""
    return {
        "model_type": "mamba",
        "num_hidden_layers": num_layers,
        "hidden_size": channels,
        "expand": 1,
        "state_size": state_size,
        "conv_kernel": 4,
        "time_step_rank": 2,
    }


def mamba2_config(
    *, num_layers: int, heads: int, width: int, groups: int, state_size: int, conv_width: int
) -> dict[str, Any]:
    """Return the keys of a Nemotron-H config that determine the layout of its state."""
    return {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention"] * num_layers,
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "n_groups": groups,
        "ssm_state_size": state_size,
        "conv_kernel": conv_width,
    }


def short_conv_config(*, num_layers: int, channels: int, conv_width: int) -> dict[str, Any]:
    """Return the keys of an LFM2 config that determine the layout of its state."""
    return {
        "model_type": "lfm2",
        "layer_types": ["conv"] * num_layers,
        "hidden_size": channels,
        "conv_L_cache": conv_width,
    }
