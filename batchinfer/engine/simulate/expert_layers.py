"""Counts a model's layers with experts, and its layers with a dense MLP."""

from __future__ import annotations

from batchinfer.engine.kv.model_config import Config

_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Config keys for the index of the first layer with experts."""
_EVERY = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
"""Config keys for an interval s: the last layer of each group of s layers has experts."""


def num_expert_layers(config: Config, num_layers: int) -> int:
    """Return the number of layers with experts, from the text config of a model with experts."""
    kinds, layers = config.get("mlp_layer_types"), config.get("moe_layers")
    if blocks := _blocks(config):
        return blocks.count("moe")
    if kinds:
        return sum(kind != "dense" for kind in kinds[:num_layers])
    if layers is not None:
        return len(layers)
    return sum(_has_experts(config, layer) for layer in range(num_layers))


def num_dense_layers(config: Config, num_layers: int, expert_layers: int) -> int:
    """Return the number of layers with a dense MLP."""
    if blocks := _blocks(config):
        return blocks.count("mlp")
    if config.get("enable_moe_block"):  # Gemma 4: all layers have both
        return num_layers
    return num_layers - expert_layers


def _blocks(config: Config) -> list[str]:
    """Return the type of each Nemotron-H layer, such as "moe" or "mlp"; empty for other models."""
    names = ("layers_block_type", "layer_types") if config.get("model_type") == "nemotron_h" else ()
    return next((list(config[name]) for name in names if config.get(name)), [])


def _has_experts(config: Config, layer: int) -> bool:
    last, frequency = config.get("moe_layer_end_index"), config.get("moe_layer_freq") or 1
    if isinstance(frequency, list | tuple):
        is_chosen = bool(frequency[layer])
    else:
        is_chosen = layer % frequency == 0
    period, offset = config.get("expert_layer_period") or 1, config.get("expert_layer_offset") or 0
    return (
        is_chosen
        and all(layer >= (config.get(name) or 0) for name in _FIRST)
        and all((layer + 1) % (config.get(name) or 1) == 0 for name in _EVERY)
        and (last is None or last < 0 or layer <= last)
        and layer not in (config.get("mlp_only_layers") or ())
        and layer % period == offset % period
    )
