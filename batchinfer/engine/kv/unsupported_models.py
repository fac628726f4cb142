"""Refuses models whose configs show that they cannot run, and says why."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.engine.kv.model_config import Config, text_config
from batchinfer.engine.kv.recurrent_families import is_recurrent

_RECURRENT_FAMILIES = frozenset(
    [
        "bailing_hybrid",
        "minimax",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
    ]
)
_RECURRENT_LAYERS = frozenset(
    [
        "conv",
        "hybrid",
        "hybrid_sliding",
        "linear",
        "linear_attention",
        "mamba",
        "mamba2",
        "recurrent",
    ]
)
_OTHER_LAYERS = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"),
        "reference_sliding_attention",
    }
)
# Keys of configs that give layers different KV shapes.
_PER_LAYER_KEYS = (
    "block_configs",
    "num_attention_heads_per_layer",
)
_SPARSE_KEYS = ("index_topk", "sparse_attention_config")


def refuse_unsupported(config: Config) -> None:
    """Raise ValueError, with the reason, for models that paged attention cannot run."""
    text = text_config(config)
    family = str(config.get("model_type") or text.get("model_type") or "unknown")
    reason = _unsupported(config, family) or _unsupported(text, str(text.get("model_type")))
    if reason is not None:
        raise ValueError(f"a model of the family {family!r} cannot be run: {reason}")


def _unsupported(config: Config, family: str) -> str | None:
    if config.get("is_encoder_decoder") or config.get("cross_attention_layers"):
        return (
            "it is an encoder-decoder (is_encoder_decoder); only decoder-only models are supported"
        )
    if family in _RECURRENT_FAMILIES:
        return "it keeps recurrent state in addition to its KV"
    if family == "longcat_flash":
        return "each of its layers attends twice, which is not supported yet"
    if family == "paligemma":
        return "its attention over the prompt is bidirectional"
    if family in {"bloom", "mpt"}:
        return "it uses ALiBi position biases"
    if config.get("alibi"):
        return "it uses ALiBi position biases (alibi)"
    layer_types = set(config.get("layer_types") or config.get("layers_block_type") or ())
    if layer_types & _RECURRENT_LAYERS and not is_recurrent(config):
        return f"it has recurrent layers ({', '.join(sorted(layer_types & _RECURRENT_LAYERS))})"
    others = layer_types - _OTHER_LAYERS - _RECURRENT_LAYERS
    if others:
        names = ", ".join(sorted(others))
        return f"it has layers of unknown types (layer_types): {names}"
    for key in _PER_LAYER_KEYS:
        if config.get(key):
            return f"its layers differ in the shape of their KV ({key})"
    for key in ("num_key_value_heads", "num_kv_heads", "head_dim"):
        if isinstance(config.get(key), list | tuple):
            return f"its layers differ in the shape of their KV ({key})"
    for key in _SPARSE_KEYS:
        if config.get(key):
            return f"its attention is sparse ({key})"
    return _unsupported_rope(config)


def _unsupported_rope(config: Config) -> str | None:
    """Return the reason why a model's rotary embeddings are not supported, or None.

    The scale of ``dynamic`` embeddings depends on the longest sequence of a batch, so a row's
    output would depend on other rows.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    entries = [rope, *(entry for entry in rope.values() if isinstance(entry, Mapping))]
    for entry in entries:
        if (entry.get("rope_type") or entry.get("type")) == "dynamic":
            return (
                "its rotary embeddings depend on the longest sequence in the batch "
                "(rope_parameters: dynamic)"
            )
    return None
