"""Checks of a loaded model by a few tokens: does it do what paged attention needs?

Two equal sequences of two tokens stand side by side in one packed row. Every layer must ask for
paged attention once, in order, with the layout's shapes and the window its config says; and both
sequences must get the same logits, which they do not where a model ignores the positions it is
given or mixes neighbours (a convolution, recurrent state, a bias by distance).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchinfer.engine.kv.layer_groups import layer_windows
from batchinfer.engine.kv.layout import KVLayout, text_config
from batchinfer.errors import ModelError
from batchinfer.worker.attention.attention import UnsupportedAttentionError
from batchinfer.worker.probe import AttentionRecorder, Probe

_TOKENS = (3, 7)
_RELATIVE_TOLERANCE = 2e-2  # of the largest logit: enough for 16-bit weights


def check_model(model: torch.nn.Module, layout: KVLayout) -> None:
    """Check a loaded model on the device it is on.

    Raises:
        ModelError: naming the family and what it does differently.
    """
    config: Any = model.config
    try:
        logits, windows = _probe(model, layout)
        _check_windows(windows, config.get_text_config())
        _check_grouping(windows, config.to_dict())
        _check_logits(logits)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises on its first call
        raise ModelError(
            f"models of the family {config.model_type!r} cannot be run: {error}"
        ) from error


def _probe(model: torch.nn.Module, layout: KVLayout) -> tuple[torch.Tensor, list[int]]:
    """Logits [4, vocabulary] of the two sequences, and each layer's window."""
    probe = Probe(model, layout, _TOKENS, num_sequences=2)
    attention = AttentionRecorder(probe.backend)
    logits = probe.logits(attention)
    for expected, (layer, _, _) in enumerate(attention.calls):
        if layer != expected:
            raise UnsupportedAttentionError(f"its layers do not attend in order (layer {layer})")
    if len(attention.calls) != layout.num_layers:
        raise UnsupportedAttentionError(
            f"{len(attention.calls)} of its {layout.num_layers} layers ask for paged attention"
        )
    return logits, [call.variant.sliding_window for call in attention.calls]


def _check_windows(windows: list[int], config: Any) -> None:
    """Compare the windows the layers asked for with the kinds of layers the config names."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != (windows[layer] > 0):
            raise UnsupportedAttentionError(
                f"layer {layer} is of the type {kind} and asks for a window of {windows[layer]}"
            )


def _check_grouping(windows: list[int], config: Mapping[str, Any]) -> None:
    """Check that no layer sees further back than the blocks it is kept."""
    for layer, kept in enumerate(layer_windows(text_config(config), len(windows))):
        if kept and windows[layer] != kept:
            raise UnsupportedAttentionError(
                f"layer {layer} asks for a window of {windows[layer]}, its config says {kept}"
            )


def _check_logits(logits: torch.Tensor) -> None:
    first, second = logits.float().view(2, len(_TOKENS), -1)
    if not (first.isfinite().all() and second.isfinite().all()):
        return  # weights that overflow: each row finds out by itself
    if (first - second).abs().max() > _RELATIVE_TOLERANCE * first.abs().max():
        raise UnsupportedAttentionError(
            "what stands beside a row changes it (positions or neighbours are mixed up)"
        )
